"""Tokens sorted by cluster: the sort, and statistics over it (sizes: sorted_cases.py)."""

import pytest
import torch
from sorted_cases import C, D, E, K, T, drawn_assignment, sort

from acmoe.errors import UserError
from acmoe.ops.sort.op import sort_with_tokens_op
from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.scale import scale_from_dispersion
from acmoe.ops.statistics.scale_op import ScaleSettings
from acmoe.ops.statistics.sorted_op import sorted_cluster_scale, sorted_dispersion
from slow_cases import mostly_slow

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("poisoned_empty")
ALIGNMENT = 64


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


def test_what_does_not_fit_is_refused(generator: torch.Generator, device: str) -> None:
    clusters = sort(drawn_assignment(generator).to(device))
    with pytest.raises(UserError, match=r"x has shape \(120, 70\) and the order 576 slots"):
        sorted_dispersion(torch.zeros(120, D, device=device), clusters)
    with pytest.raises(UserError, match="iqr"):
        sorted_dispersion(torch.zeros(T, D, device=device), clusters, measure="iqr")
