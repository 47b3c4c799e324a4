"""Choose for the up projection between the Hopper kernel (up.py) and Triton's.

D features, F hidden units, N rows.
"""

import torch
from torch import Tensor

from acmoe.ops.device.hopper import gluon_unsupported
from acmoe.ops.experts.settings import lookup, rules
from acmoe.ops.experts.settings.gemms import PIPELINE_BK
from acmoe.ops.experts.triton import launch as triton_launch
from acmoe.ops.experts.triton.sizes import RowOperand, Sizes
from acmoe.ops.experts.triton.tiles import Plan

_COLUMNS = 128  # hidden units of a tile


def up_unsupported(
    tokens: RowOperand, up_bias: Tensor | None, size: Sizes, dropout: float, keep: bool
) -> str | None:
    """Return the reason why the Hopper kernel cannot or should not run, or None."""
    dtype = tokens.values.dtype
    if keep or up_bias is not None or dropout > 0 or size.act != "swiglu":
        return "it stores no h, has neither bias nor dropout, and only the activation swiglu"
    if dtype != torch.bfloat16 or not tokens.gather:
        return f"it gathers bfloat16, not {dtype}, and no copied rows"
    if size.dim % PIPELINE_BK or size.hidden % 8 or size.hidden < _COLUMNS:
        return f"it takes D % {PIPELINE_BK} == 0 and F >= {_COLUMNS}, not {size.dim}, {size.hidden}"
    if "up" in lookup.OVERRIDE or not rules.up_by_pipeline(size.layer(dtype)):
        return "Triton's is expected to be faster"
    return gluon_unsupported(tokens.values.device)


def run_up(
    tokens: RowOperand,
    up: Tensor,
    up_bias: Tensor | None,
    plan: Plan,
    size: Sizes,
    dropout: float,
    seed: Tensor,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the results of `run_up` in triton/launch.py: h (N, W) if `keep`, and a (N, F)."""
    if up_unsupported(tokens, up_bias, size, dropout, keep) is not None:
        return triton_launch.run_up(tokens, up, up_bias, plan, size, dropout, seed, keep=keep)
    from acmoe.ops.experts.hopper.launch import launch_up

    return up.new_empty(0, size.width), launch_up(tokens.values, up, plan, size.hidden)
