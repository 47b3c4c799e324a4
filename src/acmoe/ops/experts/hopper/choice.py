"""Choose for each expert GEMM between the Hopper kernel (pipeline.py), Triton's and torch's.

The Hopper kernels, with a multistage TMA pipeline, and torch's grouped GEMM run where
settings/lookup.py says that they are faster and where they support the call; the Triton kernels
(triton/launch.py) run everywhere else.

D features, F hidden units, W = 2F for swiglu, else F, E experts, N rows.
"""

import functools
import logging

import torch
from torch import Tensor

from acmoe.config.environment import gluon_requested
from acmoe.ops.device.hopper import gluon_unsupported
from acmoe.ops.device.launcher import compute
from acmoe.ops.experts.grouped_mm import grouped_mm_unsupported, rows_by_torch, weights_by_torch
from acmoe.ops.experts.settings.gemms import (
    GROUPED_MM,
    PIPELINE_BK,
    PIPELINE_BM,
    WEIGHT_GEMMS,
    PipelineConfig,
)
from acmoe.ops.experts.settings.lookup import copies_rows, pipeline_for
from acmoe.ops.experts.triton import launch as triton_launch
from acmoe.ops.experts.triton.backward_launch import run_activation
from acmoe.ops.experts.triton.sizes import HiddenInputs, Partials, RowOperand, Sizes
from acmoe.ops.experts.triton.tiles import Plan
from acmoe.ops.experts.triton.tokens import row_operand

_log = logging.getLogger("acmoe")

MOST_GROUPS = 1024  # one thread of a block prepares each group in torch's grouped GEMM


def _gemm_sizes(kernel: str, size: Sizes, gather: bool) -> tuple[int, int]:
    """Return the two dimensions of a GEMM that its tiles must fit.

    For a GEMM by rows they are the inner and the outer dimension; for a weight gradient the wide
    (256) and the narrow (128) side of its tiles. Tokens to gather are the narrow side.
    """
    if kernel == "up_weight" and gather:
        return size.width, size.dim
    return {
        "hidden": (size.dim, size.hidden),
        "down": (size.hidden, size.dim),
        "input": (size.width, size.dim),
        "down_weight": (size.hidden, size.dim),
        "up_weight": (size.dim, size.width),
    }[kernel]


def _unsupported_shape(
    kernel: str, size: Sizes, settings: PipelineConfig, gather: bool
) -> str | None:
    """Return the reason why the Hopper kernel does not support a shape, or None if it does.

    Rows must be a multiple of 32 bytes long. The last tile of a row may overlap the one before, so
    that a dimension must only be as long as a tile; that of "hidden", which writes over its input,
    ends at a panel of 64 columns instead.
    """
    inner, outer = _gemm_sizes(kernel, size, gather)
    weight = kernel in WEIGHT_GEMMS
    missing = (settings.form == "ping-pong" and weight) or (
        settings.form == "columns" and kernel != "down"
    )
    if missing:
        return f"there is no GEMM {kernel} in the form {settings.form!r}"
    step_i, step_o = (16 if weight else PIPELINE_BK), (64 if kernel == "hidden" else 16)
    if inner % step_i or outer % step_o:
        return f"its tiles need multiples of {step_i} and {step_o}, not {inner}, {outer}"
    tile_i, tile_o = (settings.columns, PIPELINE_BM) if weight else (PIPELINE_BK, settings.columns)
    if inner < tile_i or (outer < tile_o and kernel != "hidden"):
        return f"its tiles are {tile_i} by {tile_o}, larger than {inner} by {outer}"
    return None


def pipeline_unsupported(
    kernel: str,
    size: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    *,
    gather: bool,
    bare: bool = True,
    result: torch.dtype | None = None,
) -> str | None:
    """Return the reason why the Hopper kernel cannot or should not run a GEMM, or None if it can.

    gather: an operand is tokens to gather; bare: the call has neither bias nor dropout; result: the
    dtype of the result, None for that of the tokens.
    """
    settings = pipeline_for(kernel, size.layer(dtype))
    return _settings_unsupported(settings, kernel, size, dtype, device, gather, bare, result)


def _settings_unsupported(
    settings: PipelineConfig | None,
    kernel: str,
    size: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    gather: bool,
    bare: bool,
    result: torch.dtype | None,
) -> str | None:
    """Return the same for these settings; the number of tokens is not read."""
    if settings is None:
        return "it was not found faster for this shape"
    if dtype != torch.bfloat16:
        return f"it takes bfloat16, not {dtype}"
    if result not in (None, dtype) and (
        result != torch.float32 or gather or settings == GROUPED_MM
    ):
        # A cast afterwards would round, and take another pass over memory.
        form = " where it gathers tokens" if gather else ""
        return f"it gives bfloat16{form}, and the weights are {result}"
    if settings == GROUPED_MM:
        return _torch_unsupported(kernel, size, dtype, device, gather, bare)
    if not bare or (kernel == "hidden" and size.act != "swiglu"):
        return "it supports neither bias nor dropout, and only the activation swiglu"
    if gather and not (settings.gathers and kernel in WEIGHT_GEMMS):
        return "it reads rows, and tokens are gathered for this shape"
    return _unsupported_shape(kernel, size, settings, gather) or gluon_unsupported(device)


def _torch_unsupported(
    kernel: str, size: Sizes, dtype: torch.dtype, device: torch.device, gather: bool, bare: bool
) -> str | None:
    """Return the reason why torch's grouped GEMM cannot run a GEMM, or None if it can.

    Its weight gradients of experts without rows are not zero on Blackwell
    (https://github.com/pytorch/pytorch/issues/172439); on older GPUs it waits for the offsets.
    """
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if kernel == "hidden" or gather or not bare:
        return "torch's grouped GEMM has no activation, bias, dropout or gather"
    if size.experts > MOST_GROUPS:
        return f"torch's grouped GEMM has up to {MOST_GROUPS} groups, not {size.experts}"
    if major != 9 and not (major == 10 and kernel not in WEIGHT_GEMMS):
        return "torch's grouped GEMM is used on Hopper, and by rows on Blackwell"
    return grouped_mm_unsupported(device, dtype, size.dim, size.hidden, size.width)


def gathers(
    kernel: str,
    size: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    *,
    result: torch.dtype | None = None,
) -> bool:
    """Return True if a GEMM gathers its tokens, False if it reads rows that were copied first.

    The backward copies x and the output's gradient. x is only read by up_weight, so that its copy
    is omitted if the Hopper kernel can gather there. The gradient's copy is read by two GEMMs, one
    of which, hidden, cannot gather in its Hopper kernel.
    """
    layer = size.layer(dtype)
    if not copies_rows(layer, backward=kernel != "up"):
        return True
    settings = pipeline_for(kernel, layer) if kernel == "up_weight" else None
    if settings is None or not settings.gathers:
        return False
    return pipeline_unsupported(kernel, size, dtype, device, gather=True, result=result) is None


def row_operand_for(
    kernel: str, x: Tensor, inverse: Tensor, size: Sizes, result: torch.dtype | None = None
) -> RowOperand:
    """Return x (T, D) as the GEMM `kernel` reads it: x itself to gather from, or its sorted rows.

    result: the dtype of a weight gradient.
    """
    gather = gathers(kernel, size, x.dtype, x.device, result=result)
    return row_operand(x, inverse, size, gather=gather)


@functools.lru_cache(maxsize=256)
def _usable_settings(
    gluon_option: str,
    settings: PipelineConfig | None,
    kernel: str,
    size: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    gather: bool,
    bare: bool,
    result: torch.dtype | None,
) -> PipelineConfig | None:
    """Return the settings if the Hopper kernel can run this kind of call, else None; logged once.

    gluon_option is the environment's, on which `gluon_unsupported` depends: it is part of the cache
    key.
    """
    where = (kernel, size, dtype, device)
    reason = _settings_unsupported(settings, *where, gather, bare, result)
    if reason is None:
        by = "torch's grouped GEMM" if settings == GROUPED_MM else "gluon"
        _log.info("the experts' GEMM %s runs on %s", kernel, by)
        return settings
    _log.info("the experts' GEMM %s runs on triton; gluon: %s", kernel, reason)
    return None


def _settings_for(
    kernel: str,
    size: Sizes,
    x: Tensor,
    *,
    gather: bool,
    bare: bool,
    result: torch.dtype | None = None,
) -> PipelineConfig | None:
    """Return the Hopper kernel's settings for a GEMM, or None for the Triton kernel.

    The number of tokens is no part of the cache key.
    """
    settings = pipeline_for(kernel, size.layer(x.dtype))
    where = (size._replace(tokens=0), x.dtype, x.device)
    return _usable_settings(gluon_requested(), settings, kernel, *where, gather, bare, result)


def run_rows(
    kernel: str,
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    size: Sizes,
    *,
    across: bool = False,
) -> Tensor:
    """Return (N, O) = a @ weight[e]^T + bias[e] for weight (E, O, I).

    across: return a @ weight[e] + bias[e] for weight (E, I, O).
    """
    settings = _settings_for(kernel, size, a, gather=False, bare=bias is None)
    if settings is None:
        return triton_launch.run_rows(kernel, a, weight, bias, plan, size, across=across)
    if settings == GROUPED_MM:
        return compute(functools.partial(rows_by_torch, across=across), a, weight, plan.offsets)
    from acmoe.ops.experts.hopper.launch import launch_columns, launch_rows

    if settings.form == "columns":
        return launch_columns(a, weight, plan, settings.stages, gated=False)
    return launch_rows(a, weight, plan, settings, across=across)


def run_hidden(
    upstream: RowOperand, down: Tensor, given: HiddenInputs, plan: Plan, size: Sizes
) -> tuple[Tensor, Partials]:
    """Write dh (N, W); return gate * a (N, F) and the partial sums for `run_reduce_partials`.

    Both ways allocate one buffer of (N, F): the Triton kernels write gate * a over da.
    """
    bare = not any(given.sums) and given.dropout == 0
    settings = _settings_for("hidden", size, upstream.values, gather=upstream.gather, bare=bare)
    if settings is not None:
        from acmoe.ops.experts.hopper.launch import launch_hidden

        a, dgate = launch_hidden(
            upstream.values, down, given.h, given.dh, given.gate, plan, settings
        )
        return a, Partials(dgate, dgate[:0])
    da = triton_launch.run_rows(
        *("hidden", upstream.values, down, None, plan, size), across=True, gather=upstream.gather
    )
    return da, run_activation(da, given, plan, size)


def run_weight(
    kernel: str, p: Tensor, q: Tensor, plan: Plan, size: Sizes, *, gather: str, dtype: torch.dtype
) -> Tensor:
    """Return (E, O, I): p^T q summed over each expert's rows, rounded once to `dtype`.

    gather: "p" or "q" for the operand that holds tokens to gather, "none" where both hold rows.
    """
    settings = _settings_for(kernel, size, p, gather=gather != "none", bare=True, result=dtype)
    if settings is None:
        return triton_launch.run_weight(kernel, p, q, plan, size, gather=gather, dtype=dtype)
    if settings == GROUPED_MM:
        return compute(weights_by_torch, p, q, plan.offsets)
    from acmoe.ops.experts.hopper.launch import launch_gathered_weights, launch_weights

    if gather == "none":
        return launch_weights(p, q, plan, settings, dtype=dtype)
    tokens, rows = (p, q) if gather == "p" else (q, p)
    return launch_gathered_weights(tokens, rows, plan, settings, transposed=gather == "q")
