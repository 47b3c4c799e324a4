"""Which kernels serve a call of window attention, and how wide its heads are for them.

B streams, H heads, L queries, N keys, P features of a head. q is (B, H, L, `fused_width`) and kv,
keys and values in one tensor, (2, B, H, N, `stored_width`).
"""

import torch
from torch import Tensor

from acmoe.config.environment import gluon_wanted, keeping_wanted
from acmoe.ops.dispatch import requested, triton_obstacle

_WIDEST = 128  # features of a head; a wider tile leaves no registers for the scores
_FEWEST_QUERIES = 16  # the smallest tile the matrix units take
_WIDEST_ON_HOPPER = 64
_SHARED_ON_HOPPER = 227 * 1024  # bytes of shared memory
_MOST_DROPPED = 0.48  # the coins of packed numbers, see ops/device/dropout_rng.py
_KEPT_SHARE = 1 / 64  # of a card's memory for the weights of one call


def window_attention_obstacle(q: Tensor, table: Tensor | None, dropout: float) -> str | None:
    """What keeps the kernels from serving this call; None: nothing."""
    if table is None:
        return "its kernel is for relative positions"
    if q.shape[-1] > _WIDEST:
        return f"its kernel holds heads of at most {_WIDEST} features, not {q.shape[-1]}"
    if q.shape[-2] < _FEWEST_QUERIES:
        return f"its kernel is for {_FEWEST_QUERIES} queries or more, not {q.shape[-2]}"
    if q.is_cuda and q.dtype == torch.float32:
        return "its kernel multiplies numbers of 16 bits, not float32"
    if not q.is_cuda and requested() != "triton":
        return "its interpreter is slow, and has to be asked for"
    if not 0 <= dropout < 1:
        return f"its kernel has no dropout of {dropout}"
    return triton_obstacle(q)


def hopper_obstacle(q: Tensor, kv: Tensor, span: int, dropout: float) -> str | None:
    """What keeps attention from the kernels for Hopper; None: nothing."""
    from acmoe.ops.device.hopper import gluon_obstacle

    obstacle = gluon_obstacle(q.device)
    if obstacle is not None:
        return obstacle
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel multiplies numbers of 16 bits, not {q.dtype}"
    if q.shape[-1] > _WIDEST_ON_HOPPER:
        return f"its kernel holds heads of at most {_WIDEST_ON_HOPPER} features, not {q.shape[-1]}"
    if dropout > _MOST_DROPPED:
        return f"its kernel drops at most {_MOST_DROPPED}, not {dropout}"
    if any(2 * step % 16 for step in kv.stride()[:-1]):
        return "its kernel reads rows of keys and values from multiples of 16 bytes on"
    from acmoe.ops.attention.hopper.forward import shared_bytes

    if shared_bytes(q.shape[-1], span) > _SHARED_ON_HOPPER:
        return f"its kernel has no room for a window of {span}"
    return None


def wishes() -> str:
    """What the environment asks for, of kept weights and of kernels in Gluon: which sizes an op's
    results have is decided by both."""
    return f"{keeping_wanted()}/{gluon_wanted()}"


def keeping_obstacle(
    q: Tensor, kv: Tensor, span: int, dropout: float, *, wanted: str | None = None
) -> str | None:
    """What keeps attention from keeping its weights for the backward; None: nothing.

    wanted: auto or never; None: what the environment asks for.
    """
    from acmoe.ops.attention.hopper.saved_weights import kept_sizes

    if (wanted or keeping_wanted()) == "never":
        return "ACMOE_KEEP_ATTENTION=never"
    obstacle = hopper_obstacle(q, kv, span, dropout)
    if obstacle is not None:
        return obstacle
    if q.shape[2] % 8 > 0:
        return f"{q.shape[2]} queries are no multiple of 8"
    if kv.shape[-2] - q.shape[2] > span:
        return f"more than {span} keys precede the first query"
    from acmoe.ops.attention.hopper.keys import stages_for

    if stages_for(q.shape[-1], kv.shape[-1], q.shape[2]) < 2:
        return f"its backward's kernel has no room for {q.shape[2]} queries of a head"
    size = kept_sizes(q.shape, kv.shape[-2], span)[0] * q.element_size()
    limit = int(_KEPT_SHARE * memory_of(q.device))
    if size > limit:
        return f"its weights take {size / 2**20:,.0f} MiB a call, of {limit / 2**20:,.0f} allowed"
    return None


def memory_of(device: torch.device) -> int:
    """Bytes of a card."""
    return torch.cuda.get_device_properties(device).total_memory


def fused_width(features: int) -> int:
    """Of a tile, a power of two: zeros change no product, and spare the kernels most masks."""
    return max(16, 1 << (features - 1).bit_length())


def stored_width(features: int) -> int:
    """Of keys and values in memory, 32 bytes at a time."""
    return (features + 15) // 16 * 16
