"""Token lists of many sets: where they lie, and statistics over them, against a loop in float64.

Kernels with order search the tokens that are sorted by cluster; without one they list them.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from route_cases import sorted_by
from torch import Tensor

from acmoe.errors import UserError
from acmoe.ops.statistics import set_op
from acmoe.ops.statistics.op import measure_dispersion, measure_scale
from acmoe.ops.statistics.scale import ScaleOptions, scale_from_dispersion
from acmoe.ops.statistics.scale_op import ScaleSettings
from acmoe.ops.statistics.set_op import (
    lists_pay,
    set_cluster_scale,
    set_dispersion,
    set_scale_op,
)
from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

OPTIONS = ScaleOptions(
    normalize="cluster", strength=None, floor=1e-3, eps=0.0, clamp=None, min_tokens=2
)


def dispersions(
    x: Tensor, assignment: Tensor, clusters: int, measure: str, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Dispersion and count by a loop over sets and clusters, in float64."""
    tokens = x.double().cpu().numpy()
    own = assignment.masked_fill(torch.zeros_like(assignment).bool() if mask is None else ~mask, -1)
    own = own.cpu().numpy()
    (sets, _, dim), found = tokens.shape, []
    for b in range(sets):
        for c in range(clusters):
            members = tokens[b][own[b] == c]
            deviation = members - members.mean(0) if len(members) else np.zeros((1, dim))
            s = np.abs(deviation).mean(0) if measure == "mad" else (deviation**2).mean(0)
            s = np.sqrt(s) if measure == "std" else s
            found.append(s if np.isfinite(s).all() else np.full(dim, math.nan))
    count = torch.tensor([[int((row == c).sum()) for c in range(clusters)] for row in own])
    spread = torch.tensor(np.array(found)).view(sets, clusters, dim)
    return spread.to(x.device), count.float().to(x.device)


def order_of(assignment: Tensor, clusters: int, mask: Tensor | None) -> Tensor:
    own = assignment if mask is None else assignment.masked_fill(~mask, -1)
    return sorted_by(own.flatten(), clusters)


@st.composite
def token_sets(draw: Any) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Sets with empty clusters, single tokens, masked sets, equal tokens, NaN and inf."""
    sets, tokens, clusters, dim = (
        draw(st.integers(2, 3)),
        draw(st.integers(1, 12)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 3, 17])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    offset = draw(st.sampled_from([0.0, 50.0]))
    x = (offset + torch.randn(sets, tokens, dim, generator=generator)).to(dtype)
    assignment = torch.randint(-1, clusters, (sets, tokens), generator=generator)
    if draw(st.booleans()):
        x[0] = x[0, :1].clone()  # the tokens of the first set are equal
    for bad in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=2)):
        x[-1, draw(st.integers(0, tokens - 1)), draw(st.integers(0, dim - 1))] = bad
    if not draw(st.booleans()):
        return x, assignment, clusters, None
    mask = torch.rand(sets, tokens, generator=generator) < 0.7
    mask[0] &= draw(st.booleans())  # False: a set without tokens
    return x, assignment, clusters, mask


@given(
    case=token_sets(), measure=st.sampled_from(["mad", "variance", "std"]), by_order=st.booleans()
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_dispersion_and_scale_are_those_of_a_loop(
    case: tuple[Tensor, Tensor, int, Tensor | None], measure: str, by_order: bool, device: str
) -> None:
    x, assignment, clusters, mask = (
        one.to(device) if isinstance(one, Tensor) else one for one in case
    )
    order = order_of(assignment, clusters, mask) if by_order else None
    named: dict[str, Any] = {"token_mask": mask, "order": order}
    wanted, wanted_count = dispersions(x, assignment, clusters, measure, mask)
    spread, count = set_dispersion(x, assignment, clusters, measure=measure, **named)
    assert torch.equal(count, wanted_count)
    # Deviations of float32 numbers near 50 are rounded to 2^-19, and of their mean likewise.
    torch.testing.assert_close(spread.double(), wanted, rtol=2e-5, atol=1e-5, equal_nan=True)
    assert (spread[wanted == 0] == 0).all()
    scale, none, count = set_cluster_scale(
        *(x, assignment, clusters, ScaleSettings(measure)), with_dispersion=False, **named
    )
    assert none is None and torch.equal(count, wanted_count)
    # The scale of the dispersion that was found: dispersions near 0 may differ by much more.
    wanted_scale = scale_from_dispersion(spread.double(), count)
    torch.testing.assert_close(scale.double(), wanted_scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("by_order", [True, False])
def test_a_scale_by_hand(by_order: bool, device: str) -> None:
    """Set 0: cluster 0 has (0, 0) and (2, 6), so mad (1, 3); 1/s over its mean is (3/2, 1/2)."""
    x = torch.tensor([[[0.0, 0], [9, 9], [2, 6]], [[1, 1], [1, 5], [7, 7]]], device=device)
    assignment = torch.tensor([[0, 1, 0], [1, 1, -1]], device=device)
    order = order_of(assignment, 2, None) if by_order else None
    scale, spread, count = set_cluster_scale(x, assignment, 2, order=order)
    assert spread is not None
    assert count.tolist() == [[2, 1], [0, 2]]
    assert spread.tolist() == [[[1, 3], [0, 0]], [[0, 0], [0, 2]]]
    # Set 1, cluster 1: s = (0, 2) has mean 1, and 0 is raised to the floor 1e-3.
    weight = torch.tensor([1e3, 0.5]) / 500.25
    torch.testing.assert_close(scale[0, 0].cpu(), torch.tensor([1.5, 0.5]))
    torch.testing.assert_close(scale[1, 1].cpu(), weight)
    assert (scale[0, 1] == 1).all() and (scale[1, 0] == 1).all()


@mostly_slow(
    ("sizes", "dtype"),
    [
        ((2, 70, 1, 37), torch.float32),  # lists of several steps; one cluster
        ((2, 6, 90, 20), torch.bfloat16),  # more clusters than tokens
        ((2, 40, 3, 1030), torch.bfloat16),
        ((5, 300, 2, 5), torch.float16),  # a search in two steps
    ],
    keep=(0, 1, 3),
    gpu=range(4),
)
@pytest.mark.parametrize("by_order", [True, False])
def test_sets_of_any_size(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    by_order: bool,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from acmoe.ops.statistics.triton import set_dispersion as kernels

    monkeypatch.setattr(kernels, "SEARCH", (16, 16))
    B, L, C, D = sizes
    x = (3 + torch.randn(B, L, D, generator=generator)).to(device, dtype)
    assignment = torch.randint(-1, C, (B, L), generator=generator).to(device)
    assignment[0, 1:] = 0  # one cluster has nearly all tokens of its set
    order = order_of(assignment, C, None) if by_order else None
    wanted, wanted_count = dispersions(x, assignment, C, "mad", None)
    spread, count = set_dispersion(x, assignment, C, order=order)
    assert torch.equal(count, wanted_count)
    torch.testing.assert_close(spread.double(), wanted, rtol=1e-5, atol=1e-6)


@mostly_slow(
    "changes",
    [
        {"normalize": "feature", "clamp": 10.0, "eps": 1e-4, "floor": 0.0, "min_tokens": 0},
        {"normalize": "global", "clamp": 1.5, "mean_before_clamp": True, "mean_over": "chosen"},
        {"mean_over": "chosen", "eps": 1e-4, "min_tokens": 0},
        {"normalize": "global", "min_tokens": 3},
    ],
    keep=(1, 2),
    ids=str,
)
def test_options_that_compare_clusters_are_the_definitions(
    changes: dict[str, Any], generator: torch.Generator, device: str
) -> None:
    options = OPTIONS._replace(**changes)
    x = torch.randn(3, 20, 9, generator=generator).exp().to(device)
    assignment = torch.randint(-1, 4, (3, 20), generator=generator).to(device)
    mask = (torch.rand(3, 20, generator=generator) < 0.8).to(device)
    mask[1] = False
    given = (x, assignment, 6, options)
    named: dict[str, Any] = {"measure": "std", "token_mask": mask}
    found = measure_scale(*given, order=order_of(assignment, 6, mask), **named)
    wanted = measure_scale.definition(x.double(), *given[1:], **named)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


def test_the_ops_choose_lists_where_they_pay(
    generator: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acmoe.ops.statistics.triton import scale as kernels

    calls = []
    monkeypatch.setattr(set_op, "FEW_CLUSTERS", 2)
    measure = kernels.measure_sets
    monkeypatch.setattr(
        kernels, "measure_sets", lambda *given: (calls.append(len(calls)), measure(*given))
    )
    x = torch.randn(2, 9, 5, generator=generator).to(device)
    assignment = torch.randint(0, 3, (2, 9), generator=generator).to(device)
    out = torch.empty(2, 3, 5, device=device), torch.empty(2, 3, device=device)
    scale = measure_scale(x, assignment, 3, OPTIONS, measure="mad", out=out)
    spread, count = measure_dispersion(x, assignment, 3, measure="mad")
    assert calls == [0, 1]
    assert torch.equal(out[0], spread) and torch.equal(out[1], count)

    def doubled(scale: Tensor, spread: Tensor, count: Tensor) -> Tensor:
        assert torch.equal(spread, out[0]) and torch.equal(count, out[1])
        return 2 * scale

    twice = measure_scale(x, assignment, 3, OPTIONS._replace(transform=doubled), measure="mad")
    assert torch.equal(twice, 2 * scale)
    order, before = order_of(assignment[:1], 3, None), len(calls)
    one_set = measure_scale(x[:1], assignment[:1], 3, OPTIONS, measure="mad", order=order)
    assert len(calls) == before and one_set.shape == (1, 3, 5)
    torch.testing.assert_close(one_set, scale[:1], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("sets", "tokens", "clusters", "dim", "is_sorted", "pays"),
    [
        (64, 512, 64, 2048, True, True),
        (48, 512, 32, 352, True, False),  # few clusters
        (32, 512, 512, 2048, False, True),
        (1, 512, 512, 2048, True, False),
        (8, 16384, 64, 2048, True, False),  # 256 tokens a list
        (2, 16384, 512, 2048, True, True),
        (2, 16384, 512, 2048, False, False),  # every program would read 16384 clusters
        (48, 512, 64, 20000, True, False),
    ],
)
def test_lists_pay_for_short_ones(
    sets: int, tokens: int, clusters: int, dim: int, is_sorted: bool, pays: bool
) -> None:
    assert lists_pay(sets, tokens, clusters, dim, is_sorted=is_sorted) == pays


def test_the_op_is_well_formed(generator: torch.Generator, device: str) -> None:
    x = torch.randn(2, 9, 3, generator=generator).to(device)
    assignment = torch.zeros(2, 9, device=device).long()
    places = (torch.empty(2, 2, 3, device=device), torch.empty(2, 2, device=device))
    rest = ("mad", "cluster", 1e-3, 0.0, None, 2, False, "all")
    for spread in (places[0], None):
        args = (x, assignment, None, None, None, spread, places[1], *rest)
        torch.library.opcheck(set_scale_op, args, test_utils=("test_schema", "test_faketensor"))


def test_what_has_no_kernel_is_refused(device: str) -> None:
    x, assignment = torch.ones(2, 4, 2, device=device), torch.zeros(2, 4, device=device).long()
    with pytest.raises(UserError, match="gini"):
        set_dispersion(x, assignment, 1, measure="gini")
    with pytest.raises(UserError, match="rows"):
        set_cluster_scale(x, assignment, 1, ScaleSettings(normalize="rows"))
