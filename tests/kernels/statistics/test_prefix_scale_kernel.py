"""The scale of each token by kernel against the definition in float64, and what it may not see.

Two sequences of 90 tokens: a list is longer than the 64 tokens whose terms are added up first.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from acmoe.ops.dispatch import use_backend
from acmoe.ops.native.library import missing
from acmoe.ops.statistics.prefix import PrefixMoments, Prior
from acmoe.ops.statistics.prefix.launched import fused_prefix_scale, prefix_scale_op
from acmoe.ops.statistics.prefix.native import scale_in_c
from acmoe.ops.statistics.prefix.op import measure_prefix_scale
from acmoe.ops.statistics.scale import ScaleOptions
from slow_cases import mostly_slow

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

B, L, D, C = 2, 90, 70, 4
Run = Callable[..., Any]
OPTIONS = ScaleOptions(
    normalize="cluster", strength=None, floor=1e-3, eps=0.0, clamp=None, min_tokens=2
)


@pytest.fixture(autouse=True)
def blocks_of_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several programs share a list."""
    from acmoe.ops.statistics.triton import prefix

    monkeypatch.setattr(prefix, "FEATURES", 64)


@pytest.fixture(params=["triton", "native"])
def scale_by(request: pytest.FixtureRequest, device: str) -> Run:
    """The kernel, as a function of x, clusters (B, L), before, prior and options."""
    if request.param == "native" and (device != "cpu" or missing()):
        pytest.skip("the kernel in C serves CPUs with a compiler")

    def run(x: Tensor, assignment: Tensor, *rest: Any, **named: Any) -> Any:
        given, ids_BLJ = {"measure": "mad"} | named, assignment[..., None]
        if request.param == "triton":
            return fused_prefix_scale(x, ids_BLJ, *rest, **given)
        return scale_in_c(x.float().contiguous(), ids_BLJ.contiguous(), *rest, **given)

    return run


def drawn(generator: torch.Generator, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(B, L, D, generator=generator) + 3).to(device, dtype)


def clusters(generator: torch.Generator, device: str) -> Tensor:
    """Half of the tokens are in cluster 0, cluster 3 is empty, some tokens are in none."""
    ids = torch.randint(-1, C - 1, (B, L), generator=generator)
    ids[torch.rand(B, L, generator=generator) < 0.5] = 0
    return ids.to(device)


def some_prior(generator: torch.Generator, device: str) -> Prior:
    """Cluster 1 has an average of one token, which is too few."""
    average = torch.rand(C, D, generator=generator) + 0.1
    return Prior(average.to(device), torch.tensor([50.0, 1.0, 2.0, 9.0], device=device), 16.0)


def in_float64(
    x: Tensor,
    assignment: Tensor,
    before: PrefixMoments,
    prior: Prior,
    options: ScaleOptions = OPTIONS,
    **named: object,
) -> tuple[Tensor, PrefixMoments]:
    before = PrefixMoments(*(moment.double() for moment in before))
    prior = Prior(prior.dispersion.double(), prior.weight.double(), prior.tokens)
    args = (x.double(), assignment[..., None], before, prior, options)
    return measure_prefix_scale.definition(*args, **named)  # type: ignore[arg-type]


@mostly_slow("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("measure", ["mad", "variance", "std"])
def test_the_kernel_is_the_definition(
    measure: str,
    dtype: torch.dtype,
    scale_by: Run,
    generator: torch.Generator,
    device: str,
) -> None:
    x, assignment = drawn(generator, device, dtype), clusters(generator, device)
    mask = (torch.rand(B, L, generator=generator) < 0.9).to(device)
    prior = some_prior(generator, device)
    before = PrefixMoments.empty(B, C, D, device=device)
    found, after = scale_by(x, assignment, before, prior, OPTIONS, measure=measure, token_mask=mask)
    wanted, wanted_after = in_float64(
        x, assignment, before, prior, measure=measure, token_mask=mask
    )
    counted = mask & (assignment >= 0)
    # The dispersion of two nearly equal numbers has few digits: hence the absolute part.
    assert torch.allclose(found[counted].double(), wanted[counted], rtol=1e-4, atol=1e-5)
    assert (found[~counted] == 1).all()
    for one, other in zip(after, wanted_after, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-6, "floor": 0.0, "min_tokens": 0}])
def test_sizes_at_the_ends_of_float32(
    size: float,
    options: dict[str, float],
    scale_by: Run,
    generator: torch.Generator,
    device: str,
) -> None:
    x = drawn(generator, device) * size
    assignment = clusters(generator, device)
    prior = Prior(torch.zeros(C, D, device=device), torch.zeros(C, device=device), 16.0)
    before, chosen = PrefixMoments.empty(B, C, D, device=device), OPTIONS._replace(**options)
    found, _ = scale_by(x, assignment, before, prior, chosen)
    wanted, _ = in_float64(x, assignment, before, prior, chosen, measure="mad")
    counted = assignment >= 0
    assert torch.allclose(found[counted].double(), wanted[counted], rtol=1e-4, atol=1e-5)


def test_neither_the_future_nor_other_clusters_change_a_bit(
    scale_by: Run, generator: torch.Generator, device: str
) -> None:
    x, assignment = drawn(generator, device), clusters(generator, device)
    before, prior = PrefixMoments.empty(B, C, D, device=device), some_prior(generator, device)
    found, _ = scale_by(x, assignment, before, prior, OPTIONS)
    cut = 70
    later_x, later = x.clone(), assignment.clone()
    later_x[:, cut:], later[:, cut:] = math.nan, 0
    changed, _ = scale_by(later_x, later, before, prior, OPTIONS)
    assert torch.equal(found[:, :cut], changed[:, :cut])
    other_x = torch.where((assignment == 0)[..., None], x * 3 + 1, x)
    changed, _ = scale_by(other_x, assignment, before, prior, OPTIONS)
    assert torch.equal(found[assignment > 0], changed[assignment > 0])


def test_a_token_that_is_not_finite_is_left_out(
    scale_by: Run, generator: torch.Generator, device: str
) -> None:
    x, assignment = drawn(generator, device), clusters(generator, device)
    before, prior = PrefixMoments.empty(B, C, D, device=device), some_prior(generator, device)
    kept = (torch.rand(B, L, generator=generator) < 0.9).to(device)
    found, after = scale_by(x, assignment, before, prior, OPTIONS, token_mask=kept)
    bad = torch.tensor([[math.nan], [math.inf], [-math.inf]], device=device)
    number = int((~kept).sum())
    x[~kept] = torch.where(torch.arange(D, device=device) == 5, bad, 1.0).repeat(number, 1)[:number]
    again, again_after = scale_by(x, assignment, before, prior, OPTIONS)
    pairs = zip((found, *after), (again, *again_after), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_decoding_continues_where_the_prompt_stopped(
    scale_by: Run, generator: torch.Generator, device: str
) -> None:
    x, assignment = drawn(generator, device), clusters(generator, device)
    moments, prior = PrefixMoments.empty(B, C, D, device=device), some_prior(generator, device)
    all_at_once, _ = scale_by(x, assignment, moments, prior, OPTIONS)
    parts = []
    for step in (slice(0, 87), slice(87, 88), slice(88, 88), slice(88, 90)):
        args = (x[:, step], assignment[:, step], moments, prior, OPTIONS)
        part, moments = scale_by(*args)
        parts.append(part)
    assert torch.allclose(torch.cat(parts, 1), all_at_once, rtol=1e-4, atol=1e-5)


def test_the_prior_counts_as_so_many_tokens_by_hand(scale_by: Run, device: str) -> None:
    # Tokens (0, 0) and (2, 6): s = (0.5, 1.5), as the prior of two tokens (2.5, 0.5) counts as much
    # s = (1.5, 1), and M = (1/1.5, 1) over its mean 5/6.
    x = torch.tensor([[[0.0, 0.0], [2.0, 6.0]]], device=device)
    prior = Prior(torch.tensor([[2.5, 0.5]]).to(device), torch.full((1,), 9.0).to(device), 2.0)
    zeros = torch.zeros(1, 2, dtype=torch.int64, device=device)
    before = PrefixMoments.empty(1, 1, 2, device=device)
    found, _ = scale_by(x, zeros, before, prior, OPTIONS)
    wanted = torch.tensor([0.8, 1.2], device=device)
    assert torch.allclose(found[0, 1, 0], wanted, rtol=1e-6)


def test_options_without_a_kernel_run_the_definition(
    generator: torch.Generator, device: str
) -> None:
    x, assignment = drawn(generator, device), clusters(generator, device)
    args = (x, assignment[..., None], PrefixMoments.empty(B, C, D, device=device))
    prior = some_prior(generator, device)

    def reason(options: ScaleOptions, **named: str) -> str:
        with use_backend("triton"):
            calls = measure_prefix_scale.reasons(
                *args, prior, options, **({"measure": "mad"} | named)
            )
        return calls["triton"] or ""

    assert reason(OPTIONS) == ""
    assert "compare clusters" in reason(OPTIONS._replace(normalize="global"))
    assert "compare clusters" in reason(OPTIONS._replace(strength=0.5))
    assert "divides by zero" in reason(OPTIONS._replace(floor=0.0))
    assert "has no kernel" in reason(OPTIONS, measure="gini")
    x.requires_grad_()
    assert "no gradient" in reason(OPTIONS)


def test_the_op_is_well_formed(generator: torch.Generator, device: str) -> None:
    x = torch.randn(1, 5, 3, generator=generator).to(device)
    before = PrefixMoments.empty(1, 2, 3, device=device)
    average = torch.rand(2, 3, generator=generator).to(device)
    args = (
        *(x, torch.zeros(1, 5, device=device).long(), None, *before),
        *(average, average.sum(1), "mad", 16.0, 1e-3, 0.0, 2),
    )
    torch.library.opcheck(prefix_scale_op, args, test_utils=("test_schema", "test_faketensor"))
