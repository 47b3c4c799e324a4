"""A router in one kernel: affinities, the best k, their gate, and the sums of the balance loss.

    affinity_te = sum_d x_td * scale[cluster of t]_d * embedding_ed + bias_e + noise_te
Each program owns a block of tokens and all experts, reads x once, and keeps the affinities in
registers while it chooses. No (T, D) float32 copy of the tokens exists.

Where tokens come sorted by cluster (ops/sort/triton/sort.py) a block has one scale, and
    affinity_te = sum_d x_td * (scale_d * embedding_ed)
leaves the token as it is: the products of the plain router, on an embedding rescaled on the way.
(Where the embedding's tile is no smaller than the tokens', and both are bf16, the tokens are
rescaled by that one scale instead.) In their own order tokens are rescaled one by one.

Floor: x read once (T D itemsize bytes), and (T, E) float32 noise, if any; (T, E) float32 affinities
and (T, K) choices written. The products are 2 T D E operations, done 1 to 6 times in bf16
(ops/device/dot.py).

T tokens, D features, E experts, C clusters, K experts per token, N token blocks, X sorted places.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import accurate_dot, pieces
from acmoe.ops.device.reduce_partials import totals
from acmoe.ops.route.triton.tokens import Tokens, load_limits, load_scale, load_scaled, load_tokens

# Below every rank, that of -inf too: an expert that is taken or does not exist.
TAKEN = tl.constexpr(-0x80000000)
# Terms of a product with a 16-bit token (ops/device/dot.py). A bf16 token in no cluster loses
# nothing, and a scale of one changes no bit. A token rescaled in its own order is cut to two
# pieces: its affinities are off by 2^-18 of their size (root mean square), where a float32 sum over
# 2048 features one by one is off by 2^-20 and the token's own rounding moves them by 2^-10.
TERMS_OF_16_BITS = 4
# Of sorted bf16 tokens and a bf16 embedding what is rescaled keeps two pieces, the other one: at
# most 2^-18 of each product is left out. A third piece costs 31 us at qwen30b and 1.5 at switch, of
# 197 and 16.5 (H200).
TERMS_OF_SORTED = 3


class Tile(NamedTuple):
    tokens: int
    features: int
    num_warps: int
    num_stages: int
    registers: int | None = None


def launch_table(
    num_experts: int, num_tokens: int, in_order: bool, wide: bool, whole: bool
) -> Tile:
    """The whole row of experts sits in registers: more experts, fewer tokens.

    As many features a step with a scale as without: steps decide the order of additions, and a
    scale of one must not change a bit. 64 where tokens and embedding are bf16 (`whole`): 86 us, 96
    with 32, and 180 for 199 with a scale (qwen30b, H200). Else 32: within a step the matrix units
    truncate, and float32 tokens would lose 2^-20.

    Where steps are short or programs few, more loads are under way: of 32 features, 38 us with 8
    stages, 48 with 5 for mixtral's 8192 tokens. So where 128 experts leave room for one program a
    multiprocessor, of 32 features again; of float32 tokens 5 stages would be more than the 99 KiB a
    program has on smaller cards. Sorted tokens, each waited for twice, rather have three programs
    there, though some numbers spill.
    """
    if num_experts > 256:
        return Tile(16, 32, 8, 2)
    if num_experts > 128:
        return Tile(64, 32, 8, 2)
    if whole:
        return Tile(64, 64, 4, 6 if num_experts <= 16 and num_tokens <= 2**14 else 3)
    if num_experts <= 16:
        return Tile(64, 32, 4, 8 if num_tokens <= 2**14 else 5)
    if in_order and num_tokens >= 2**15:
        return Tile(128, 32, 8, 3 if wide else 5)
    return Tile(64, 32, 4, 3, 168 if num_experts > 64 and not in_order else None)


def terms(tokens: Tokens, whole: bool) -> int:
    """Products per product, at most. whole: of a bf16 embedding."""
    if tokens.has_order and whole:
        return TERMS_OF_SORTED
    exact = tokens.x.dtype == torch.bfloat16 and tokens.has_order
    return 6 if exact or tokens.x.dtype == torch.float32 else TERMS_OF_16_BITS


def route(
    tokens: Tokens,
    embedding_ED: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    over_selected: bool,
    temperature: float,
    noise_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """expert_ids (T, K) int64, gate (T, K), affinity (T, E), gate sums (E,), load (E,), first (T,).

    The last is the first choice, int64, in a tensor of its own.
    """
    T, D = tokens.x.shape
    E = embedding_ED.shape[0]
    whole = tokens.x.dtype == embedding_ED.dtype == torch.bfloat16
    wide = tokens.x.dtype == torch.float32
    tile = launch_table(E, T, not tokens.has_order, wide, whole)
    if tokens.has_scale and not tokens.has_order:
        # A scale a token is loaded ahead as well: 6 stages would take more than the 99 KiB of
        # shared memory that a program has on smaller cards.
        tile = tile._replace(num_stages=min(tile.num_stages, 3))
    N = tokens.blocks(tile.tokens)
    affinity_TE = tokens.x.new_empty(T, E, dtype=torch.float32)
    gate_TK = affinity_TE.new_empty(T, top_k)
    ids_TK = affinity_TE.new_empty(T, top_k, dtype=torch.int64)
    first_T = ids_TK.new_empty(T)
    partial_2NE = affinity_TE.new_empty(2, N, E)
    if T > 0:
        _route_kernel[(N,)](
            *tokens.pointers, embedding_ED.contiguous(), embedding_ED if bias_E is None else bias_E,
            affinity_TE if noise_TE is None else noise_TE.contiguous(), ids_TK, gate_TK,
            affinity_TE, partial_2NE, first_T, T, D, E, tokens.scale.shape[0], 1.0 / temperature,
            K=top_k, SELECTED=over_selected, HAS_BIAS=bias_E is not None,
            HAS_NOISE=noise_TE is not None, **tokens.flags, TERMS=terms(tokens, whole),
            BT=tile.tokens, BD=tile.features, BE=max(16, triton.next_power_of_2(E)),
            BK=max(2, triton.next_power_of_2(top_k)), num_warps=tile.num_warps,
            num_stages=tile.num_stages, maxnreg=tile.registers,
        )  # fmt: skip
    gate_E, load_E = totals(partial_2NE if T > 0 else partial_2NE[:, :0])
    return ids_TK, gate_TK, affinity_TE, gate_E, load_E, first_T


@triton.jit
def _affinity(
    x_ptr, scale_ptr, cluster, embedding_ptr, t, row, kept, e, D, E, HAS_SCALE: tl.constexpr,
    SORTED: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BT, BE), dtype=tl.float32)
    # What is bf16, and not rescaled, goes from memory to the matrix units; what is not is cut into
    # pieces. Of a bf16 embedding and sorted bf16 tokens one has to be: the smaller tile.
    WHOLE: tl.constexpr = PLAIN_BF16 and embedding_ptr.dtype.element_ty == tl.bfloat16
    CUT_X: tl.constexpr = WHOLE and SORTED and BE >= BT
    CUT_WEIGHT: tl.constexpr = not WHOLE or (SORTED and not CUT_X)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        x = load_scaled(x_ptr, scale_ptr, cluster, t, row, kept, d, D, HAS_SCALE, SORTED, BT)
        known = (d[:, None] < D) & (e[None, :] < E)
        weight = tl.load(embedding_ptr + e[None, :] * D + d[:, None], mask=known, other=0.0)
        weight = weight.to(tl.float32)
        if SORTED:
            scale = load_scale(scale_ptr, cluster, d, D)
            if CUT_X:
                x *= scale[None, :]
            else:
                weight *= scale[:, None]
        x_high, x_middle, x_low = pieces(x, PLAIN_BF16 and not CUT_X)
        high, middle, low = pieces(weight, not CUT_WEIGHT)
        total += accurate_dot(
            x_high, x_middle, x_low, high, middle, low, PLAIN_BF16 and not CUT_X, not CUT_WEIGHT,
            TERMS,
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
    x_ptr, scale_ptr, cluster_ptr, mask_ptr, place_ptr, embedding_ptr, bias_ptr,
    noise_ptr, ids_ptr, gate_ptr, affinity_ptr, partial_ptr, first_ptr, T, D, E, C,
    inverse_temperature, K: tl.constexpr, SELECTED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NOISE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr, SORTED: tl.constexpr,
    PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BT
    e = tl.arange(0, BE)
    partial_ptr += tl.program_id(0) * E + e
    t, known, kept, cluster = load_tokens(
        cluster_ptr, mask_ptr, place_ptr, load_limits(cluster_ptr, C, BC), start, T, C, HAS_SCALE,
        HAS_MASK, SORTED, BT, BC,
    )  # fmt: skip
    if SORTED:
        if tl.max(t) < 0:  # a block without tokens
            tl.store(partial_ptr, tl.zeros((BE,), dtype=tl.float32), mask=e < E)
            partial_ptr += tl.num_programs(0) * E
            tl.store(partial_ptr, tl.zeros((BE,), dtype=tl.float32), mask=e < E)
            return
    affinity = _affinity(
        x_ptr, scale_ptr, cluster, embedding_ptr, t, start.to(tl.int64), kept, e, D, E, HAS_SCALE,
        SORTED, PLAIN_BF16, TERMS, BT, BD, BE,
    )  # fmt: skip
    if HAS_BIAS:
        affinity += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    at = t.to(tl.int64)[:, None] * E + e[None, :]
    exists = known[:, None] & (e[None, :] < E)
    if HAS_NOISE:
        affinity += tl.load(noise_ptr + at, mask=exists, other=0.0)
    tl.store(affinity_ptr + at, affinity, mask=exists)

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
    tl.store(gate_ptr + at, gate, mask=known[:, None] & (k[None, :] < K))
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=known[:, None] & (k[None, :] < K))
    first = tl.sum(tl.where(k[None, :] == 0, ids, 0), axis=1)
    tl.store(first_ptr + t, first.to(tl.int64), mask=known)

    share = tl.where(kept[:, None], softmax_rows(affinity * inverse_temperature), 0.0)
    tl.store(partial_ptr, tl.sum(share, axis=0), mask=e < E)
    taken = (taken & kept[:, None]).to(tl.float32)
    partial_ptr += tl.num_programs(0) * E
    tl.store(partial_ptr, tl.sum(taken, axis=0), mask=e < E)
