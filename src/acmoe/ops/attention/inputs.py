"""The inputs that the forward and the backward kernels of `window_attention` share.

B streams, H heads, L queries, N keys, P features of a head (support.py), W window.
"""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The arguments of a call of the kernels. Features from `features` on are zeros."""

    q: Tensor  # (B, H, L, `fused_width(P)`)
    k: Tensor  # (B, H, N, `stored_width(P)`)
    v: Tensor  # (B, H, N, `stored_width(P)`)
    rel_emb: Tensor  # (`fused_width(P)`, W) relative-position embedding
    key_mask: Tensor | None  # (B, N) True where a key may be seen
    query_bits: Tensor  # (B, H, L) int32 seeds of dropout
    scale: float  # factor of the scores
    dropout: float
    features: int  # features of a head in the output and in the gradient of q
