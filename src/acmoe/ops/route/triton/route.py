"""The fused router: affinities, top-k, gate, and the sums of the balance loss in one kernel.

    affinity_te = sum_d x_td * scale[cluster of t]_d * embedding_ed + bias_e + noise_te
    gate (T, K) = softmax over all E affinities at the selected ones, or over the K selected

Each program owns a block of tokens and all experts. It reads x once and keeps the affinities in
registers while it selects, so no (T, D) float32 copy of the tokens exists. More than MANY_EXPERTS
would leave registers for a few tokens alone, and every program reads the whole embedding: there one
kernel computes the affinities in tiles of tokens and experts, and a second one reads them back. Few
tokens would be few programs: there the first kernel also splits the features (few_tokens.py).

Where tokens are sorted by cluster (ops/sort/triton/sort.py) a block has one scale, and
    affinity_te = sum_d x_td * (scale_d * embedding_ed)
is the plain router's GEMM with an embedding that is rescaled as it is loaded. (Where the
embedding's tile is not smaller than the tokens' tile, and both are bf16, the tokens are rescaled
instead.) Unsorted tokens are rescaled one by one; with more than MANY_EXPERTS before the GEMM
(rescale.py), so that not every tile of experts rescales them again, or on Hopper in a GEMM with
wide tiles (hopper/affinity.py).

Memory traffic: x (T D itemsize bytes) and, if any, (T, E) float32 noise read once; (T, E) float32
affinities and (T, K) ids and gates written. The GEMM is 2 T D E operations, done 1 to 6 times in
bf16 (ops/device/dot.py).

E is a compile-time parameter of the router's kernels, because Triton loads rows of E numbers as
vectors where it knows what divides E. Of an argument it knows only whether 16 does: with 40 experts
the backward loaded rows of d affinity number by number, without a pipeline.

T tokens, D features, E experts, C clusters, K experts per token, N token blocks, X slots of the
sorted tokens. Names such as olmoe are benchmark shapes (lab/bench/shapes.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.device.reduce_partials import reduce_balance, reduce_partials
from acmoe.ops.route.hopper.choice import router_unsupported
from acmoe.ops.route.triton.affinity import add_bias_noise, affinity_block
from acmoe.ops.route.triton.few_tokens import partial_affinities, range_size
from acmoe.ops.route.triton.keys import TAKEN, affinity_keys, affinity_of
from acmoe.ops.route.triton.many_experts import many_affinities
from acmoe.ops.route.triton.rescale import MANY_EXPERTS
from acmoe.ops.route.triton.route_tiles import choose_tile, step_size, terms
from acmoe.ops.route.triton.tokens import Tokens, load_cluster_ends, load_tokens


def route(
    tokens: Tokens,
    embedding_ED: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    over_selected: bool,
    temperature: float,
    noise_TE: Tensor | None = None,
    totals: str = "sums",
    keeps: bool = False,
    weight: float = 1.0,
) -> tuple[Tensor, ...]:
    """Return expert ids, gate, affinity, gate sums, load and first choice of every token.

    Tokens whose features are split (`in_ranges`) must not be sorted.

    Shapes: ids (T, K) int64, gate (T, K), affinity (T, E), gate sums (E,), load (E,), first (T,)
    int64. The first choice equals ids[:, 0], in a tensor of its own. over_selected: the gate is a
    softmax over the selected experts alone. Gate sums: sum over unmasked tokens of softmax(affinity
    / temperature). totals: "none" for a zero () in place of gate sums and load, which nobody reads;
    "balance" for the balance loss (), times `weight`, in their place; "shares" for that and, in
    place of the load, each expert's share of it (E,). keeps: return the rescaled tokens (T, D) that
    `many_affinities` kept for backward, too, if it kept any.
    """
    T, D = tokens.x.shape
    E = embedding_ED.shape[0]
    if in_one_kernel(tokens.x, embedding_ED, tokens.mask if tokens.has_mask else None, top_k):
        router = embedding_ED, bias_E, noise_TE
        found = _hopper_route(tokens, router, top_k, over_selected, temperature, totals != "none")
        *chosen, partial_2NE, first_T = found
        return *chosen, *_reduce(partial_2NE, T, totals, weight), first_T
    both_bf16 = tokens.x.dtype == embedding_ED.dtype == torch.bfloat16
    step = step_size(tokens.x, embedding_ED)
    size = range_size(tokens.x, embedding_ED)
    assert not (tokens.is_sorted and size < D), "tokens are sorted, and a program has many clusters"
    selects = E > MANY_EXPERTS or size < D  # it reads affinities, no tokens
    tile = choose_tile(tokens, E, size < D, both_bf16, totals)
    selecting = tokens.in_place() if selects else tokens
    N = selecting.blocks(tile.tokens)
    affinity_TE = tokens.x.new_empty(T, E, dtype=torch.float32)
    gate_TK = affinity_TE.new_empty(T, top_k)
    ids_TK = affinity_TE.new_empty(T, top_k, dtype=torch.int64)
    first_T = ids_TK.new_empty(T)
    # The only program computes the loss itself, and writes it to `partial_2NE`.
    alone = totals == "balance" and N == 1 and not selecting.is_sorted
    partial_2NE = affinity_TE.new_empty(() if alone or totals == "none" else (2, N, E))
    kept_TD: Tensor | None = None
    if T > 0:
        router = (
            embedding_ED.contiguous(), embedding_ED if bias_E is None else bias_E,
            affinity_TE if noise_TE is None else noise_TE.contiguous(),
        )  # fmt: skip
        flags = {"HAS_BIAS": bias_E is not None, "HAS_NOISE": noise_TE is not None}
        flags["TERMS"] = terms(tokens, both_bf16)
        known, kept_TD = _known_affinities(
            tokens, embedding_ED, bias_E, noise_TE, affinity_TE, flags["TERMS"], size, step, keeps
        )
        launch(
            _route_kernel, (N,), *tokens.pointers, *router, known, ids_TK, gate_TK,
            affinity_TE, partial_2NE, first_T, T, D, tokens.scale.shape[0], 1.0 / temperature,
            weight, E=E, K=top_k, SELECTED=over_selected, **flags, **selecting.flags,
            RANGES=cdiv(D, size) if selects else 0, TOTALS=_totals_flag(totals, alone),
            BT=tile.tokens, BD=step, BE=max(16, next_power_of_2(E)),
            BK=max(2, next_power_of_2(top_k)),
            num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.registers,
        )  # fmt: skip
    kept = () if kept_TD is None else (kept_TD,)
    totalled = (partial_2NE,) * 2 if alone else _reduce(partial_2NE, T, totals, weight)
    return ids_TK, gate_TK, affinity_TE, *totalled, first_T, *kept


def in_one_kernel(x_TD: Tensor, embedding_ED: Tensor, mask_T: Tensor | None, top_k: int) -> bool:
    """Return True if one Hopper kernel routes the tokens, which need no sorting by cluster."""
    return router_unsupported(x_TD, embedding_ED, mask_T, top_k) is None


def _hopper_route(
    tokens: Tokens,
    router: tuple[Tensor, Tensor | None, Tensor | None],
    top_k: int,
    over_selected: bool,
    temperature: float,
    sums: bool,
) -> tuple[Tensor, ...]:
    """Run the Hopper kernel; return ids, gate, affinity, partial sums (2, N, E) and first choices.

    router: embedding, bias and noise. sums: False if nobody reads the partial sums; a zero () is
    returned in their place.
    """
    from acmoe.ops.route.hopper.launch import ROWS_OF_SUMS, launch_router

    T, E = tokens.x.shape[0], router[0].shape[0]
    affinity_TE = tokens.x.new_empty(T, E, dtype=torch.float32)
    gate_TK = affinity_TE.new_empty(T, top_k)
    ids_TK = affinity_TE.new_empty(T, top_k, dtype=torch.int64)
    first_T = ids_TK.new_empty(T)
    partial_2NE = affinity_TE.new_empty((2, cdiv(T, ROWS_OF_SUMS), E) if sums else ())
    launch_router(
        *(tokens, router, (affinity_TE, ids_TK, gate_TK, first_T, partial_2NE)),
        top_k=top_k,
        over_selected=over_selected,
        temperature=temperature,
        sums=sums,
    )
    return ids_TK, gate_TK, affinity_TE, partial_2NE, first_T


def _known_affinities(
    tokens: Tokens,
    embedding_ED: Tensor,
    bias_E: Tensor | None,
    noise_TE: Tensor | None,
    affinity_TE: Tensor,
    num_terms: int,
    size: int,
    step: int,
    keeps: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run the kernels that compute affinities before the selection, where there are any.

    Returns what `_route_kernel` reads, affinities or their sums over ranges of `size` features, and
    the rescaled tokens that were kept for backward. num_terms, step: TERMS and BD of the kernels.
    """
    if size < tokens.x.shape[1]:
        return partial_affinities(tokens, embedding_ED, size, num_terms, step), None
    if embedding_ED.shape[0] > MANY_EXPERTS:
        kept_TD = many_affinities(
            tokens, embedding_ED, bias_E, noise_TE, affinity_TE, num_terms, step, keeps
        )
        return affinity_TE, kept_TD
    return affinity_TE, None  # not read


def _totals_flag(totals: str, alone: bool) -> int:
    """Return TOTALS of `_route_kernel`."""
    if totals == "none":
        return 0
    return 2 if alone else 1


def _reduce(partial_2NE: Tensor, num_tokens: int, totals: str, weight: float) -> tuple[Tensor, ...]:
    """Return the gate sums and the load, or what `totals` asks for in their place (`route`)."""
    if totals == "none":
        return partial_2NE, partial_2NE
    if totals == "balance":
        balance = reduce_balance(partial_2NE, num_tokens, weight)
        return balance, balance
    if totals == "shares":
        share_E = partial_2NE.new_empty(partial_2NE.shape[2])
        return reduce_balance(partial_2NE, num_tokens, weight, share_E), share_E
    gate_E, load_E = reduce_partials(partial_2NE if num_tokens > 0 else partial_2NE[:, :0])
    return gate_E, load_E


@triton.jit
def _top_k(affinity, e, E, K: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr):
    """Return ids and affinities (BT, BK) of the K best experts, best first, and a (BT, BE) mask.

    As in torch.topk, NaN comes first; among equal values the lowest index does.
    """
    key = tl.where(e[None, :] < E, affinity_keys(affinity), TAKEN)
    k = tl.arange(0, BK)
    ids = tl.zeros((BT, BK), dtype=tl.int32)
    values = tl.zeros((BT, BK), dtype=tl.float32)
    for i in range(0, K):
        best = tl.max(key, axis=1)
        expert = tl.min(tl.where(key == best[:, None], e[None, :], BE), axis=1)
        is_kth = k[None, :] == i
        ids = tl.where(is_kth, expert[:, None], ids)
        values = tl.where(is_kth, affinity_of(best)[:, None], values)
        key = tl.where(e[None, :] == expert[:, None], TAKEN, key)
    return ids, values, (key == TAKEN) & (e[None, :] < E)


@triton.jit
def softmax_rows(value):
    """Softmax along axis 1; entries that do not exist hold -inf."""
    weight = tl.exp(value - tl.max(value, axis=1)[:, None])
    return weight / tl.sum(weight, axis=1)[:, None]


@triton.jit
def _load_affinities(
    known_ptr, affinity_ptr, bias_ptr, noise_ptr, offs, valid, t, in_bounds, e, T, E,
    HAS_BIAS: tl.constexpr, HAS_NOISE: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """Return known affinities (BT, BE), or add up their sums over RANGES of features and store."""
    affinity = tl.load(known_ptr + offs, mask=valid, other=0.0)
    if RANGES > 1:
        for _ in tl.static_range(1, RANGES):
            known_ptr += T * E
            affinity += tl.load(known_ptr + offs, mask=valid, other=0.0)
        affinity = add_bias_noise(
            affinity, bias_ptr, noise_ptr, t, in_bounds, e, E, HAS_BIAS, HAS_NOISE
        )
        tl.store(affinity_ptr + offs, affinity, mask=valid)
    return affinity


@triton.jit
def _select(
    affinity, t, in_bounds, e, ids_ptr, gate_ptr, first_ptr, E, K: tl.constexpr,
    SELECTED: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store ids, gate and first choice of each token.

    Return the affinities (BT, BE), which are -inf in columns beyond the last expert, and a mask
    that is True for the selected ones.
    """
    ids, values, selected = _top_k(affinity, e, E, K, BT, BE, BK)
    k = tl.arange(0, BK)
    affinity = tl.where(e[None, :] < E, affinity, float("-inf"))
    values = tl.where(k[None, :] < K, values, float("-inf"))
    if SELECTED:
        gate = softmax_rows(values)
    else:
        row_max = tl.max(affinity, axis=1)[:, None]
        gate = tl.exp(values - row_max) / tl.sum(tl.exp(affinity - row_max), axis=1)[:, None]
    offs = t.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(gate_ptr + offs, gate, mask=in_bounds[:, None] & (k[None, :] < K))
    tl.store(ids_ptr + offs, ids.to(tl.int64), mask=in_bounds[:, None] & (k[None, :] < K))
    first = tl.sum(tl.where(k[None, :] == 0, ids, 0), axis=1)
    tl.store(first_ptr + t, first.to(tl.int64), mask=in_bounds)
    return affinity, selected


@triton.jit
def _route_kernel(
    x_ptr, scale_ptr, cluster_ptr, mask_ptr, perm_ptr, embedding_ptr, bias_ptr,
    noise_ptr, known_ptr, ids_ptr, gate_ptr, affinity_ptr, partial_ptr, first_ptr, T, D, C,
    inverse_temperature, weight, E: tl.constexpr, K: tl.constexpr, SELECTED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NOISE: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr, SORTED: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr,
    RANGES: tl.constexpr,
    TOTALS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Select the experts of a block of tokens.

    RANGES: 0 to compute the affinities here, 1 if they are known, and more if `known` holds their
    sums over so many ranges of features (few_tokens.py). TOTALS: 0 to write a zero to partial_ptr,
    1 for the sums of the program, 2 if this is the only program, for the balance loss, times
    `weight`.
    """
    start = tl.program_id(0) * BT
    e = tl.arange(0, BE)
    loss_ptr = partial_ptr
    if TOTALS == 0:
        if start == 0:
            tl.store(loss_ptr, 0.0)
    partial_ptr += tl.program_id(0) * E + e
    t, in_bounds, unmasked, cluster = load_tokens(
        cluster_ptr, mask_ptr, perm_ptr, load_cluster_ends(cluster_ptr, C, BC), start, T, C,
        HAS_SCALE, HAS_MASK, SORTED, BT, BC,
    )  # fmt: skip
    if SORTED:
        if tl.max(t) < 0:  # the block has padding slots only
            if TOTALS == 1:
                tl.store(partial_ptr, tl.zeros((BE,), dtype=tl.float32), mask=e < E)
                partial_ptr += tl.num_programs(0) * E
                tl.store(partial_ptr, tl.zeros((BE,), dtype=tl.float32), mask=e < E)
            return
    offs = t.to(tl.int64)[:, None] * E + e[None, :]
    valid = in_bounds[:, None] & (e[None, :] < E)
    if RANGES > 0:
        affinity = _load_affinities(
            known_ptr, affinity_ptr, bias_ptr, noise_ptr, offs, valid, t, in_bounds, e, T, E,
            HAS_BIAS, HAS_NOISE, RANGES,
        )  # fmt: skip
    else:
        affinity = affinity_block(
            x_ptr, scale_ptr, cluster, embedding_ptr, bias_ptr, noise_ptr, t, start.to(tl.int64),
            in_bounds, unmasked, e, 0, D, D, E, HAS_BIAS, HAS_NOISE, HAS_SCALE, SORTED, False,
            PLAIN_BF16, TERMS, BT, BD, BE,
        )  # fmt: skip
        tl.store(affinity_ptr + offs, affinity, mask=valid)

    affinity, selected = _select(
        affinity, t, in_bounds, e, ids_ptr, gate_ptr, first_ptr, E, K, SELECTED, BT, BE, BK
    )

    if TOTALS > 0:
        prob = tl.where(unmasked[:, None], softmax_rows(affinity * inverse_temperature), 0.0)
        selected = (selected & unmasked[:, None]).to(tl.float32)
        gate_sum, load = tl.sum(prob, axis=0), tl.sum(selected, axis=0)
        if TOTALS == 2:
            share = load / tl.maximum(tl.sum(load), 1.0)
            tl.store(loss_ptr, weight * (E * tl.sum(share * (gate_sum / T))))
        else:
            tl.store(partial_ptr, gate_sum, mask=e < E)
            partial_ptr += tl.num_programs(0) * E
            tl.store(partial_ptr, load, mask=e < E)
