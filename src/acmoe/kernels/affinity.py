"""A router in one kernel: affinities, the best k, their gate, and the sums of the balance loss.

    affinity_te = sum_d x_td * scale[cluster of t]_d * embedding_ed + bias_e
Each program owns a block of tokens and all experts, reads x once, and keeps the affinities in
registers while it chooses. No (T, D) float32 copy of the tokens exists.

Floor: x read once (T D itemsize bytes); (T, E) float32 affinities and (T, K) choices written. The
products are 2 T D E operations, done 3 to 6 times in bf16 (kernels/products.py).

T tokens, D features, E experts, K experts per token, N token blocks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.kernels.products import accurate_dot, pieces

# Below every rank, that of -inf too: an expert that is taken or does not exist.
TAKEN = tl.constexpr(-0x80000000)
# Terms of a product with a 16-bit token (kernels/products.py). A bf16 token in no cluster loses
# nothing, and a scale of one changes no bit. A rescaled one is cut to two pieces: its affinities
# are off by 2^-18 of their size (root mean square), where a float32 sum over 2048 features one by
# one is off by 2^-20 and the token's own rounding moves them by 2^-10.
TERMS_OF_16_BITS = 4


class Tile(NamedTuple):
    tokens: int
    features: int
    num_warps: int
    num_stages: int


def launch_table(num_experts: int, num_tokens: int) -> Tile:
    """The whole row of experts sits in registers: more experts, fewer tokens.

    32 features a step, with a scale (128 registers a thread) and without: two blocks of 128 tokens
    then share a multiprocessor. The same for both, since the steps decide the order of additions,
    and a scale of one must not change a bit.
    """
    if num_experts > 256:
        return Tile(16, 32, 8, 2)
    if num_experts > 128:
        return Tile(64, 32, 8, 2)
    return Tile(128, 32, 8, 3) if num_tokens >= 2**15 else Tile(64, 32, 4, 3)


def terms(dtype: torch.dtype) -> int:
    """Products per product, for tokens of this dtype."""
    return 6 if dtype == torch.float32 else TERMS_OF_16_BITS


class Tokens(NamedTuple):
    """What the kernels of a router read of its tokens, each optional part with a stand-in."""

    x: Tensor  # (T, D)
    scale: Tensor  # (C, D) float32
    assignment: Tensor  # (T,) cluster; what is not one of the C is none
    mask: Tensor  # (T,) uint8
    has_scale: bool
    has_mask: bool

    @classmethod
    def of(
        cls, x: Tensor, scale: Tensor | None, assignment: Tensor | None, mask: Tensor | None
    ) -> "Tokens":
        x = x.contiguous()
        return cls(
            x,
            x if scale is None else scale.contiguous(),
            x if assignment is None else assignment.contiguous(),
            x if mask is None else mask.contiguous().view(torch.uint8),
            scale is not None,
            mask is not None,
        )

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self[:4]

    @property
    def flags(self) -> dict[str, bool]:
        """HAS_*, and whether every number that enters a product is a bf16 one as it is."""
        plain = self.x.dtype == torch.bfloat16 and not self.has_scale
        return {"HAS_SCALE": self.has_scale, "HAS_MASK": self.has_mask, "PLAIN_BF16": plain}


def route(
    tokens: Tokens,
    embedding_ED: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    over_selected: bool,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """expert_ids (T, K) int64, gate (T, K), affinity (T, E), summed gates (E,) and load (E,)."""
    T, D = tokens.x.shape
    E = embedding_ED.shape[0]
    tile = launch_table(E, T)
    N = triton.cdiv(T, tile.tokens)
    affinity_TE = tokens.x.new_empty(T, E, dtype=torch.float32)
    gate_TK = affinity_TE.new_empty(T, top_k)
    ids_TK = affinity_TE.new_empty(T, top_k, dtype=torch.int64)
    partial_2NE = affinity_TE.new_empty(2, N, E)
    if T > 0:
        _route_kernel[(N,)](
            *tokens.pointers, embedding_ED.contiguous(), embedding_ED if bias_E is None else bias_E,
            ids_TK, gate_TK, affinity_TE, partial_2NE, T, D, E, tokens.scale.shape[0],
            1.0 / temperature, K=top_k,
            SELECTED=over_selected, HAS_BIAS=bias_E is not None, **tokens.flags,
            TERMS=terms(tokens.x.dtype),
            BT=tile.tokens, BD=tile.features, BE=max(16, triton.next_power_of_2(E)),
            BK=max(2, triton.next_power_of_2(top_k)), num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
    gate_NE, load_NE = partial_2NE
    return ids_TK, gate_TK, affinity_TE, gate_NE.sum(0), load_NE.sum(0)


@triton.jit
def load_scaled(
    x_ptr, scale_ptr, cluster, row, kept, d, D, HAS_SCALE: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """float32 tokens from int64 `row` on, times their clusters' scale; zeros where masked."""
    known = kept[:, None] & (d[None, :] < D)
    at = tl.arange(0, BT)[:, None] * D + d[None, :]
    x = tl.load(x_ptr + row * D + at, mask=known, other=0.0).to(tl.float32)
    if HAS_SCALE:
        known &= (cluster >= 0)[:, None]
        x *= tl.load(scale_ptr + cluster[:, None] * D + d[None, :], mask=known, other=1.0)
    return x


@triton.jit
def load_kept(
    assignment_ptr, mask_ptr, t, T, C, HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr
):  # fmt: skip
    """Which tokens exist and are not masked, and their clusters, -1 for none."""
    kept = t < T
    if HAS_MASK:
        kept &= tl.load(mask_ptr + t, mask=kept, other=0) != 0
    cluster = t
    if HAS_SCALE:
        cluster = tl.load(assignment_ptr + t, mask=kept, other=-1).to(tl.int32)
        cluster = tl.where(cluster < C, cluster, -1)
    return kept, cluster


@triton.jit
def _affinity(
    x_ptr, scale_ptr, cluster, embedding_ptr, row, kept, e, D, E, HAS_SCALE: tl.constexpr,
    PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BT, BE), dtype=tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        x = load_scaled(x_ptr, scale_ptr, cluster, row, kept, d, D, HAS_SCALE, BT)
        known = (d[:, None] < D) & (e[None, :] < E)
        weight = tl.load(embedding_ptr + e[None, :] * D + d[:, None], mask=known, other=0.0)
        x_high, x_middle, x_low = pieces(x, PLAIN_BF16)
        high, middle, low = pieces(weight.to(tl.float32), False)
        total += accurate_dot(
            x_high, x_middle, x_low, high, middle, low, PLAIN_BF16, False, TERMS
        )  # fmt: skip
    return total


@triton.jit
def _choose(affinity, e, E, K: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr):
    """The best k experts and their affinities, best first, and which are taken.

    An affinity's rank is an integer of the same order. NaN comes first, as in topk; of equals the
    leftmost.
    """
    bits = (affinity + 0.0).to(tl.int32, bitcast=True)  # + 0: -0 is no less than 0
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = tl.where(affinity != affinity, 0x7FFFFFFF, rank)
    rank = tl.where(e[None, :] < E, rank, TAKEN)
    k = tl.arange(0, BK)
    ids = tl.zeros((BT, BK), dtype=tl.int32)
    values = tl.zeros((BT, BK), dtype=tl.float32)
    for i in range(0, K):
        best = tl.max(rank, axis=1)
        place = tl.min(tl.where(rank == best[:, None], e[None, :], BE), axis=1)
        value = tl.where(best < 0, best ^ 0x7FFFFFFF, best).to(tl.float32, bitcast=True)
        here = k[None, :] == i
        ids = tl.where(here, place[:, None], ids)
        values = tl.where(here, value[:, None], values)
        rank = tl.where(e[None, :] == place[:, None], TAKEN, rank)
    return ids, values, (rank == TAKEN) & (e[None, :] < E)


@triton.jit
def softmax_rows(value):
    """Softmax along experts; places that do not exist hold -inf."""
    weight = tl.exp(value - tl.max(value, axis=1)[:, None])
    return weight / tl.sum(weight, axis=1)[:, None]


@triton.jit
def _route_kernel(
    x_ptr, scale_ptr, assignment_ptr, mask_ptr, embedding_ptr, bias_ptr, ids_ptr, gate_ptr,
    affinity_ptr, partial_ptr, T, D, E, C, inverse_temperature, K: tl.constexpr,
    SELECTED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BT
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    kept, cluster = load_kept(assignment_ptr, mask_ptr, t, T, C, HAS_SCALE, HAS_MASK)
    affinity = _affinity(
        x_ptr, scale_ptr, cluster, embedding_ptr, row, kept, e, D, E, HAS_SCALE, PLAIN_BF16,
        TERMS, BT, BD, BE,
    )  # fmt: skip
    if HAS_BIAS:
        affinity += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    at = t.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(affinity_ptr + at, affinity, mask=(t[:, None] < T) & (e[None, :] < E))

    ids, values, taken = _choose(affinity, e, E, K, BT, BE, BK)
    k = tl.arange(0, BK)
    affinity = tl.where(e[None, :] < E, affinity, float("-inf"))
    values = tl.where(k[None, :] < K, values, float("-inf"))
    if SELECTED:
        gate = softmax_rows(values)
    else:
        top = tl.max(affinity, axis=1)[:, None]
        gate = tl.exp(values - top) / tl.sum(tl.exp(affinity - top), axis=1)[:, None]
    at = t.to(tl.int64)[:, None] * K + k[None, :]
    known = (t[:, None] < T) & (k[None, :] < K)
    tl.store(gate_ptr + at, gate, mask=known)
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=known)

    share = tl.where(kept[:, None], softmax_rows(affinity * inverse_temperature), 0.0)
    partial_ptr += tl.program_id(0) * E + e
    tl.store(partial_ptr, tl.sum(share, axis=0), mask=e < E)
    taken = (taken & kept[:, None]).to(tl.float32)
    tl.store(partial_ptr + tl.num_programs(0) * E, tl.sum(taken, axis=0), mask=e < E)
