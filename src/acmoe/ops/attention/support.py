"""Support checks of the window attention kernels, and the padded head dimensions that they read.

B streams, H heads, L queries, N keys, P features of a head. q is (B, H, L, `fused_width`). kv holds
keys and values in one tensor, (2, B, H, N, `stored_width`).
"""

import torch
from torch import Tensor

from acmoe.config.environment import gluon_requested, saving_requested
from acmoe.ops.device_support import triton_unsupported

_WIDEST = 128  # features of a head; a wider tile leaves no registers for the scores
_FEWEST_QUERIES = 16  # the smallest tile that tensor cores take
_WIDEST_ON_HOPPER = 64  # features of a head
_MOST_DROPPED = 0.48  # limit of the paired dropout RNG, see ops/device/dropout_rng.py
_SAVED_SHARE = 1 / 64  # share of GPU memory for the saved probabilities of one call


def kernel_unsupported(q: Tensor, positions: Tensor | None, dropout: float) -> str | None:
    """Return the reason why no kernel can serve this call, or None."""
    if positions is None:
        return "its kernel is for relative positions"
    if q.shape[-1] > _WIDEST:
        return f"its kernel holds heads of at most {_WIDEST} features, not {q.shape[-1]}"
    if q.shape[-2] < _FEWEST_QUERIES:
        return f"its kernel is for {_FEWEST_QUERIES} queries or more, not {q.shape[-2]}"
    if q.is_cuda and q.dtype == torch.float32:
        return "its kernel multiplies numbers of 16 bits, not float32"
    if not 0 <= dropout < 1:
        return f"its kernel has no dropout of {dropout}"
    return triton_unsupported(q, on_cpu=False)


def hopper_unsupported(q: Tensor, kv: Tensor, span: int, dropout: float) -> str | None:
    """Return the reason why the Hopper kernels cannot serve this call, or None."""
    from acmoe.ops.device.hopper import SHARED_BYTES, gluon_unsupported

    reason = gluon_unsupported(q.device)
    if reason is not None:
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel multiplies numbers of 16 bits, not {q.dtype}"
    if q.shape[-1] > _WIDEST_ON_HOPPER:
        return f"its kernel holds heads of at most {_WIDEST_ON_HOPPER} features, not {q.shape[-1]}"
    if dropout > _MOST_DROPPED:
        return f"its kernel drops at most {_MOST_DROPPED}, not {dropout}"
    if any(2 * step % 16 for step in kv.stride()[:-1]):
        return "its kernel reads rows of keys and values from multiples of 16 bytes on"
    from acmoe.ops.attention.hopper.forward import shared_bytes

    if shared_bytes(q.shape[-1], span) > SHARED_BYTES:
        return f"its kernel has too little shared memory for a window of {span}"
    return None


def requested_options() -> str:
    """Return the options ACMOE_KEEP_ATTENTION and ACMOE_GLUON as one string.

    Both decide the sizes of the custom op's results, so the string is one of its arguments.
    """
    return f"{saving_requested()}/{gluon_requested()}"


def saving_unsupported(
    q: Tensor, kv: Tensor, span: int, dropout: float, *, wanted: str | None = None
) -> str | None:
    """Return the reason why the probabilities cannot be saved for backward, or None.

    wanted: auto or never; None takes the option of the environment.
    """
    from acmoe.ops.attention.hopper.saved_weights import saved_sizes

    if (wanted or saving_requested()) == "never":
        return "ACMOE_KEEP_ATTENTION=never"
    reason = hopper_unsupported(q, kv, span, dropout)
    if reason is not None:
        return reason
    if q.shape[2] % 8 > 0:
        return f"{q.shape[2]} queries are no multiple of 8"
    if kv.shape[-2] - q.shape[2] > span:
        return f"more than {span} keys precede the first query"
    from acmoe.ops.attention.hopper.keys import pipeline_stages

    if pipeline_stages(q.shape[-1], kv.shape[-1], q.shape[2]) < 2:
        return (
            f"its backward kernel has too little shared memory for {q.shape[2]} queries of a head"
        )
    size = saved_sizes(q.shape, kv.shape[-2], span)[0] * q.element_size()
    limit = int(_SAVED_SHARE * memory_of(q.device))
    if size > limit:
        return f"they take {size / 2**20:,.0f} MiB a call, of {limit / 2**20:,.0f} allowed"
    return None


def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def fused_width(features: int) -> int:
    """Return the head dimension of a tile: a power of two, so that kernels need few masks."""
    return max(16, 1 << (features - 1).bit_length())


def stored_width(features: int) -> int:
    """Return the head dimension of keys and values in memory: a multiple of 16 (32 bytes)."""
    return (features + 15) // 16 * 16
