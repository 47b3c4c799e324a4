"""Tokens sorted by cluster: the sort, statistics over it, and the router over it.

T = 200 tokens of C = 5 clusters: some larger than a stretch of 64 places, one empty, one of a
single token, some tokens in none. D = 70 features: no multiple of a block.
"""

from typing import Any

import pytest
import torch
from route_cases import fused_route, route_reference, sorted_by
from torch import Tensor

from acmoe.errors import UserError
from acmoe.ops.route.autograd import route_op
from acmoe.ops.sort.op import sort_with_tokens_op
from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.scale import scale_from_dispersion
from acmoe.ops.statistics.scale_op import ScaleSettings
from acmoe.ops.statistics.sorted_op import (
    sorted_cluster_scale,
    sorted_dispersion,
    sorted_dispersion_op,
    sorted_scale_op,
)
from slow_cases import mostly_slow, slow_on_cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

T, D, C, E, K = 200, 70, 5, 5, 2
ALIGNMENT = 64


@pytest.fixture(autouse=True)
def _sorted_however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than a thousand would otherwise be routed in their own order."""
    from acmoe.ops.route.triton import few_tokens

    monkeypatch.setattr(few_tokens, "MOST_TOKENS", 0)


def drawn_assignment(generator: torch.Generator) -> Tensor:
    """(T, 1): cluster 3 has one token, cluster 4 none; about a seventh are in no cluster."""
    assignment = torch.randint(-1, 6, (T, 1), generator=generator).clamp(max=2)
    assignment[assignment == 1] = 2  # about 4/7 of all tokens
    assignment[50:60] = 1
    assignment[17] = 3
    return assignment


def sort(assignment_T1: Tensor, clusters: int = C) -> TokenOrder:
    found = TokenOrder.unpack(sorted_by(assignment_T1[:, 0], clusters), clusters)
    assert found is not None
    return found


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_clusters_stand_in_order_at_multiples_of_the_stretch(
    tokens: int, generator: torch.Generator, device: str
) -> None:
    assignment = drawn_assignment(generator)[:tokens].to(device)
    ids = torch.randint(0, E + 1, (tokens, K), generator=generator).to(device)
    *rows, order = sort_with_tokens_op(ids, assignment[:, 0], C)
    token, begin, end = TokenOrder.unpack(order, C)
    assert torch.equal(rows[0], ids.flatten().sort(stable=True).indices)
    place = 0
    wanted = torch.full_like(token, -1)
    for c in (*range(C), -1):  # -1: in none, behind the last cluster
        members = (assignment[:, 0] == c).nonzero()[:, 0].int()
        at = C if c < 0 else c
        assert (begin[at], end[at]) == (place, place + len(members))
        wanted[place : place + len(members)] = members
        place += -(-len(members) // ALIGNMENT) * ALIGNMENT
    assert torch.equal(token, wanted)


@mostly_slow(
    ("measure", "dtype", "rows"),  # of a chunk: a cluster has one, or several
    [
        ("mad", torch.float32, 256),
        ("mad", torch.bfloat16, 64),
        ("mad", torch.float16, 256),
        ("variance", torch.float32, 64),
        ("variance", torch.bfloat16, 256),
        ("std", torch.float16, 64),
    ],
    keep=(0, 3),
)
def test_sorted_statistics_are_the_references(
    measure: str,
    dtype: torch.dtype,
    rows: int,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from acmoe.ops.statistics.triton import sorted_dispersion as kernels

    monkeypatch.setattr(kernels, "FEWEST_ROWS", rows)
    monkeypatch.setattr(kernels, "MOST_ROWS", rows)
    x = torch.randn(T, D, generator=generator).exp().to(device, dtype)
    assignment = drawn_assignment(generator).to(device)
    clusters = sort(assignment)
    scale, spread, count = sorted_cluster_scale(x, clusters, ScaleSettings(measure))
    wanted, wanted_count = dispersion_and_count(x.double(), assignment[:, 0], C, measure=measure)
    # Sums of at most 200 float32 terms, and a mean rounded to 2^-24 of the values.
    assert torch.allclose(spread.double(), wanted, rtol=2e-6, atol=0)
    assert torch.equal(count, wanted_count)
    wanted_scale = scale_from_dispersion(wanted, wanted_count)
    assert torch.allclose(scale.double(), wanted_scale, rtol=5e-6, atol=0)
    alone, alone_count = sorted_dispersion(x, clusters, measure=measure)
    assert torch.equal(alone, spread) and torch.equal(alone_count, count)


def test_results_go_where_they_are_wanted(generator: torch.Generator, device: str) -> None:
    x = torch.randn(T, D, generator=generator).to(device)
    clusters = sort(drawn_assignment(generator).to(device))
    scale, spread, count = sorted_cluster_scale(x, clusters)
    into = (torch.zeros(C, D, device=device), torch.zeros(C, device=device))
    for compute in (sorted_cluster_scale, sorted_dispersion):
        for place in into:
            place.zero_()
        versions = [place._version for place in into]
        *others, found, tokens = compute(x, clusters, into=into)
        assert found is into[0] and tokens is into[1]
        assert torch.equal(found, spread) and torch.equal(tokens, count)
        assert all(torch.equal(other, scale) for other in others)
        pairs = zip(into, versions, strict=True)
        assert all(place._version > before for place, before in pairs)  # autograd would notice
    for wrong in (into[0].T.contiguous().T, into[0].double(), into[0][:-1]):
        with pytest.raises(UserError, match=r"contiguous float32 of shape \(5, 70\)"):
            sorted_dispersion(x, clusters, into=(wrong, into[1]))


@mostly_slow("dtype", [torch.float32, torch.bfloat16, torch.float16], keep=(1,))
def test_equal_tokens_have_a_dispersion_of_exactly_zero(dtype: torch.dtype, device: str) -> None:
    # 0.1 is no binary number: 67 * 0.1 / 67 rounds away from it unless sums are exact.
    x = torch.full((T, D), 0.1, device=device, dtype=dtype)
    spread, _ = sorted_dispersion(x, sort((torch.arange(T, device=device) % 3)[:, None]))
    assert (spread == 0).all()


@mostly_slow("measure", ["mad", "variance"])
def test_a_large_offset_costs_no_precision(
    measure: str, generator: torch.Generator, device: str
) -> None:
    x = (1000 + torch.randn(T, D, generator=generator)).to(device)
    assignment = (torch.arange(T, device=device) % 4)[:, None]
    found, _ = sorted_dispersion(x, sort(assignment), measure=measure)
    wanted, _ = dispersion_and_count(x.double(), assignment[:, 0], C, measure=measure)
    assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=0)


@mostly_slow("bad", [float("nan"), float("inf")])
def test_a_bad_token_spoils_its_own_cluster_only(
    bad: float, generator: torch.Generator, device: str
) -> None:
    x = torch.randn(T, D, generator=generator).to(device, torch.bfloat16)
    assignment = drawn_assignment(generator).to(device)
    clusters = sort(assignment)
    clean_scale, clean, _ = sorted_cluster_scale(x, clusters)
    x[55, 5] = bad  # of cluster 1
    scale, spread, count = sorted_cluster_scale(x, clusters)
    others = torch.tensor([0, 2, 3, 4], device=device)
    assert spread[1].isnan().all() and (scale[1] == 1).all() and count[1] == 10
    assert torch.equal(spread[others], clean[others])
    assert torch.equal(scale[others], clean_scale[others])


def drawn(generator: torch.Generator, device: str, dtype: torch.dtype) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    return {
        "x": normal(T, D).to(dtype),
        "embedding": normal(E, D) / D**0.5,
        "bias": normal(E),
        "scale": normal(C, D).exp(),
        "assignment": drawn_assignment(generator)[:, 0].to(device),
    }


@mostly_slow("dtype", [torch.float32, torch.bfloat16, torch.float16], keep=(1,))
def test_the_sorted_router_is_the_reference(
    dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device, dtype)
    settings = (K, dtype != torch.float32, None, 0.7)
    order = sorted_by(case["assignment"], C)
    names = ("x", "embedding", "bias")
    exact = {n: v.double() if v.is_floating_point() else v for n, v in case.items()}
    mine = [case[name].requires_grad_() for name in names]
    theirs = [exact[name].requires_grad_() for name in names]
    found = fused_route(*case.values(), *settings, order=order)
    wanted = route_reference(*exact.values(), *settings)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    assert torch.equal(found.first, wanted.expert_ids[:, 0])
    assert torch.equal(found.load.double(), wanted.load)
    results = [found.gate, found.affinity, found.gate_sum]
    exact_results = [wanted.gate, wanted.affinity, wanted.gate_sum]
    # A bf16 token enters as it is, fp16 takes 4 terms: 2^-17 of a product (ops/device/dot.py).
    tolerance = 2e-5 if dtype == torch.float16 else 2e-6
    for one, other in zip(results, exact_results, strict=True):
        assert (one - other).abs().max() < tolerance * other.abs().max()
    upstream = [torch.randn(z.shape, generator=generator).to(device) for z in results]
    grads = torch.autograd.grad(results, mine, upstream)
    exact_grads = torch.autograd.grad(exact_results, theirs, [grad.double() for grad in upstream])
    tolerances = [2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps, 2e-5, 2e-5]
    for one, other, allowed in zip(grads, exact_grads, tolerances, strict=True):
        assert (one - other).abs().max() < allowed * other.abs().max()


@mostly_slow("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_of_one_is_the_plain_router(
    dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device, dtype)
    plain = fused_route(case["x"], case["embedding"], case["bias"], None, None, K, True)
    case["scale"] = torch.ones(C, D, device=device)
    found = fused_route(*case.values(), K, True, order=sorted_by(case["assignment"], C))
    for name in ("expert_ids", "gate", "affinity", "load", "first"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


# Experts, clusters, features. Few clusters are looked up in a list, more at a token. The scale goes
# to the embedding, or to the token where there are many experts; 130 are two blocks. One program
# does up to 16 blocks of 64 features.
SIZES = [(E, C, D), (40, 40, D), (128, 1, 1100), (130, C, D)]


def drawn_in_bf16(
    generator: torch.Generator, device: str, experts: int, clusters: int, dim: int
) -> tuple[dict[str, Any], Tensor]:
    assignment = torch.randint(-1, clusters, (T,), generator=generator).to(device)
    case = {
        "x": torch.randn(T, dim, generator=generator).to(device, torch.bfloat16),
        "embedding": torch.randn(experts, dim, generator=generator) / dim**0.5,
        "bias": None,
        "scale": torch.randn(clusters, dim, generator=generator).exp().to(device),
        "assignment": assignment,
    }
    case["embedding"] = case["embedding"].to(device, torch.bfloat16)
    return case, sorted_by(assignment, clusters)


@pytest.mark.parametrize(
    "sizes",
    [SIZES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SIZES[1:])],
)
def test_a_bf16_embedding_costs_the_sorted_router_an_eighteenth_bit_at_most(
    sizes: tuple[int, int, int], generator: torch.Generator, device: str
) -> None:
    case, order = drawn_in_bf16(generator, device, *sizes)
    wide = {n: case[n].double() for n in ("x", "embedding", "scale")}
    leaves = [case["x"].requires_grad_(), case["embedding"].requires_grad_()]
    exact_leaves = [wide["x"].requires_grad_(), wide["embedding"].requires_grad_()]
    found = fused_route(*case.values(), K, True, order=order)
    wanted = route_reference(*(case | wide).values(), K, True)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    results, exact_results = [found.gate, found.affinity], [wanted.gate, wanted.affinity]
    # 2^-18 of each product may be left out, of either sign: twice their root sum of squares is
    # rare. Gates move no more than affinities do.
    own = case["assignment"].clamp(min=0)
    scale = wide["scale"][own].masked_fill((case["assignment"] < 0)[:, None], 1.0)
    norm = ((wide["x"] * scale).square() @ wide["embedding"].square().T).sqrt().max()
    for one, other in zip(results, exact_results, strict=True):
        assert (one - other).abs().max() < 2e-6 * other.abs().max() + 2.0**-17 * norm
    grads = torch.autograd.grad(results, leaves, [z.detach() for z in results])
    exact_grads = torch.autograd.grad(exact_results, exact_leaves, exact_results)
    for one, other in zip(grads, exact_grads, strict=True):  # both are rounded to bf16
        assert (one - other).abs().max() < torch.finfo(torch.bfloat16).eps * other.abs().max()


@pytest.mark.parametrize(
    "sizes",
    [SIZES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SIZES[1:])],
)
def test_a_scale_of_one_changes_no_bit_of_results_and_tokens_gradients(
    sizes: tuple[int, int, int], generator: torch.Generator, device: str
) -> None:
    case, order = drawn_in_bf16(generator, device, *sizes)
    x = case["x"].requires_grad_()
    case["scale"] = torch.ones_like(case["scale"])
    found = fused_route(*case.values(), K, True, order=order)
    plain = fused_route(x, case["embedding"], None, None, None, K, True)
    for name in ("expert_ids", "gate", "affinity", "load", "first"):
        assert torch.equal(getattr(found, name), getattr(plain, name))
    upstream = torch.randn(T, K, generator=generator).to(device)
    grads = [torch.autograd.grad(route.gate, x, upstream)[0] for route in (found, plain)]
    assert grads[0].any() and torch.equal(*grads)


@slow_on_cpu
def test_equal_inputs_give_equal_bits(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.bfloat16)
    order = sorted_by(case["assignment"], C)
    inputs = [case[name].requires_grad_() for name in ("x", "embedding", "bias")]
    runs = []
    for _ in range(2):
        found = fused_route(*case.values(), K, True, order=order)
        results = [found.gate, found.gate_sum]
        runs.append([*found, *torch.autograd.grad(results, inputs, results)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_a_masked_token_changes_nothing(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.bfloat16)
    mask = (torch.rand(T, generator=generator) < 0.8).to(device)
    order = sorted_by(case["assignment"], C)
    runs = []
    for padding in (0.0, float("nan")):
        case["x"] = case["x"].detach().masked_fill(~mask[:, None], padding).requires_grad_()
        found = fused_route(*case.values(), K, True, mask, order=order)
        grad = torch.autograd.grad(found.gate.square().sum() + found.gate_sum[0], case["x"])
        runs.append([*found[:6], *grad])  # the last is x itself
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert (runs[0][-1][~mask] == 0).all()


def test_the_ops_are_well_formed(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.float32)
    order = sorted_by(case["assignment"], C)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    case["x"].requires_grad_()
    clusters = TokenOrder.unpack(order, C)
    args = (*case.values(), K, True, None, 1.0, clusters.token, clusters.end)
    torch.library.opcheck(route_op, args, test_utils=tests)
    options = ("mad", "cluster", 1e-3, 0.0, None, 2)
    places = (torch.empty(C, D, device=device), torch.empty(C, device=device))
    args = (case["x"].detach(), *clusters, *places)
    torch.library.opcheck(sorted_scale_op, (*args, *options), test_utils=tests[:2])
    torch.library.opcheck(sorted_dispersion_op, (*args, "std"), test_utils=tests[:2])
    args = (case["assignment"].clamp(min=0)[:, None], case["assignment"], C)
    torch.library.opcheck(sort_with_tokens_op, args, test_utils=tests[:2])


def test_what_does_not_fit_is_refused(generator: torch.Generator, device: str) -> None:
    clusters = sort(drawn_assignment(generator).to(device))
    with pytest.raises(UserError, match=r"x has shape \(120, 70\) and the order 576 slots"):
        sorted_dispersion(torch.zeros(120, D, device=device), clusters)
    with pytest.raises(UserError, match="iqr"):
        sorted_dispersion(torch.zeros(T, D, device=device), clusters, measure="iqr")
