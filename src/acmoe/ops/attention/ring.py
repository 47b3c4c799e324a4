"""Prepare one decode step of attention: rotate the new query and key, and store key and value.

Keys and values of earlier tokens lie in ring buffers; the new ones go to one place of them, whose
index is a tensor, so that a captured graph can be replayed for every step.

Shapes: B batch, H heads, N places of a ring, P features of a head, W features of a stored head (P,
filled up with zeros), J = P / 2 feature pairs.
"""

from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.attention.rotary import rotate_by
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op
from acmoe.ops.grad_mode import records_gradient


@op
def store_in_ring(
    q_BH1P: Tensor,
    k_BH1P: Tensor,
    v_BH1P: Tensor,
    keys_BHNW: Tensor,
    values_BHNW: Tensor,
    place_1: Tensor,
    rotation_21J: Tensor | None,
    factor: float,
) -> Tensor:
    """Store key and value at their place, in place; return the query times `factor` (B, H, 1, W).

    rotation_21J: cosine and sine by which query and key are rotated (rotary.py), or None.
    """
    if rotation_21J is not None:
        q_BH1P, k_BH1P = rotate_by(q_BH1P, rotation_21J), rotate_by(k_BH1P, rotation_21J)
    width = keys_BHNW.shape[-1]
    for ring_BHNW, new_BH1P in ((keys_BHNW, k_BH1P), (values_BHNW, v_BH1P)):
        ring_BHNW.index_copy_(2, place_1, _padded(new_BH1P, width).to(ring_BHNW.dtype))
    return _padded(q_BH1P * factor, width)


def _padded(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _unsupported(
    q_BH1P: Tensor, k_BH1P: Tensor, v_BH1P: Tensor, keys_BHNW: Tensor, values_BHNW: Tensor
) -> str | None:
    new = (q_BH1P, k_BH1P, v_BH1P)
    if q_BH1P.shape[2] != 1:
        return f"its kernel stores one position a call, not {q_BH1P.shape[2]}"
    if records_gradient(*new):
        return "its kernel has no gradient"
    if any(one.stride(-1) != 1 for one in new):
        return "its kernel reads features that lie next to each other"
    if not (keys_BHNW.is_contiguous() and values_BHNW.is_contiguous()):
        return "its kernel writes contiguous rings"
    return triton_unsupported(q_BH1P)


@store_in_ring.register("triton", unsupported=_unsupported)
def _store_triton(
    q_BH1P: Tensor,
    k_BH1P: Tensor,
    v_BH1P: Tensor,
    keys_BHNW: Tensor,
    values_BHNW: Tensor,
    place_1: Tensor,
    rotation_21J: Tensor | None,
    factor: float,
) -> Tensor:
    from acmoe.ops.attention.triton.ring import store

    return store(*(q_BH1P, k_BH1P, v_BH1P, keys_BHNW, values_BHNW, place_1, rotation_21J, factor))
