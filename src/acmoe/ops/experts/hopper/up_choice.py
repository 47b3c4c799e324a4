"""Choose for the up projection between the Hopper kernels (up.py, columns.py) and Triton's.

T tokens, D features, F hidden units, W = F or 2F, N rows.
"""

import torch
from torch import Tensor

from acmoe.ops.device.hopper import gluon_unsupported
from acmoe.ops.experts.hopper.choice import row_operand_for
from acmoe.ops.experts.settings import lookup, rules
from acmoe.ops.experts.settings.gemms import PIPELINE_BK
from acmoe.ops.experts.triton import launch as triton_launch
from acmoe.ops.experts.triton.sizes import Sizes
from acmoe.ops.experts.triton.tiles import Plan

_COLUMNS = 128  # hidden units of a tile


def up_unsupported(
    x: Tensor, up_bias: Tensor | None, size: Sizes, dropout: float, keep: bool
) -> str | None:
    """Return the reason why the Hopper kernels cannot or should not run, or None."""
    if keep or up_bias is not None or dropout > 0 or size.act != "swiglu":
        return "they store no h, have neither bias nor dropout, and only the activation swiglu"
    if x.dtype != torch.bfloat16:
        return f"they take bfloat16, not {x.dtype}"
    if size.dim % PIPELINE_BK or size.hidden % 8 or size.hidden < _COLUMNS:
        return (
            f"they take D % {PIPELINE_BK} == 0, F % 8 == 0 and F >= {_COLUMNS}, not "
            f"{size.dim}, {size.hidden}"
        )
    if "up" in lookup.OVERRIDE or not rules.up_by_pipeline(size.layer(x.dtype)):
        return "Triton's is expected to be faster"
    return gluon_unsupported(x.device)


def run_up(
    x: Tensor,
    inverse: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    plan: Plan,
    size: Sizes,
    dropout: float,
    seed: Tensor,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return h (N, W) if `keep`, else h without rows, and a (N, F), for tokens x (T, D).

    inverse (T * K,): the sorted row of each choice.
    """
    if up_unsupported(x, up_bias, size, dropout, keep) is not None:
        tokens = row_operand_for("up", x, inverse, size)
        return triton_launch.run_up(tokens, up, up_bias, plan, size, dropout, seed, keep=keep)
    from acmoe.ops.experts.hopper.launch import launch_columns, launch_up

    if rules.up_by_columns(size.tokens * size.top_k / size.experts, size.dim):
        a = launch_columns(x, up, plan, gated=True)
    else:
        a = launch_up(x, up, plan, size.hidden)
    return up.new_empty(0, size.width), a
