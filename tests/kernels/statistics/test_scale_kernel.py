"""The scale in three launches against `scale_from_dispersion` of the float64 dispersion."""

from typing import Any

import pytest
import torch

from acmoe import AdaptiveConfig
from acmoe.errors import UserError
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.op import measure_scale
from acmoe.ops.statistics.scale import scale_from_dispersion
from acmoe.ops.statistics.scale_op import ScaleSettings, fused_cluster_scale, scale_op
from acmoe.routing.statistics import scale_options
from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

T, D, C = 70, 37, 6
PUBLISHED: dict[str, Any] = {"eps": 1e-4, "floor": 0.0, "min_tokens": 0}


@mostly_slow(
    "options",
    [
        {},
        {"measure": "std", "floor": 0.5, "min_tokens": 12},
        {"normalize": "feature"},
        {"normalize": "global", "measure": "variance"},
        {"clamp": 1.2},
        {"normalize": "feature", "clamp": 10.0, **PUBLISHED},
        {"normalize": "global", "clamp": 1.5, **PUBLISHED},
        {"normalize": "global", "clamp": 1.5, **PUBLISHED, "mean_before_clamp": True},
        {"normalize": "feature", "clamp": 1.5, **PUBLISHED, "mean_before_clamp": True},
        {"clamp": 1.5, "mean_before_clamp": True},
    ],
    ids=str,
    keep=(0, 6, 8),
)
def test_the_kernel_is_the_reference(
    options: dict[str, Any], generator: torch.Generator, device: str
) -> None:
    x = torch.randn(T, D, generator=generator).exp().to(device, torch.bfloat16)
    assignment = torch.randint(-1, 4, (T,), generator=generator)
    assignment[7] = 4  # cluster 4 has one token, cluster 5 none
    mask = torch.rand(T, generator=generator) < 0.8
    mask[7] = True
    assignment, mask = assignment.to(device), mask.to(device)
    settings = ScaleSettings(**options)
    scale, spread, count = fused_cluster_scale(x, assignment, C, settings, token_mask=mask)

    measure = options.get("measure", "mad")
    wide, wanted_count = dispersion_and_count(
        x.double(), assignment, C, measure=measure, token_mask=mask
    )
    others = {name: value for name, value in options.items() if name != "measure"}
    wanted = scale_from_dispersion(wide, wanted_count, **others)
    assert torch.allclose(scale.double(), wanted, rtol=5e-5, atol=0)
    assert torch.allclose(spread.double(), wide, rtol=2e-5, atol=0)
    assert torch.equal(count, wanted_count)


@pytest.mark.parametrize("chosen", [None, [0, 0, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
@mostly_slow(
    "options",
    [
        {"normalize": "feature", "clamp": 10.0},
        {"normalize": "global", "clamp": 1.5, "mean_before_clamp": True},
        {},  # cluster
        {"normalize": "feature", "clamp": 1.2, "mean_before_clamp": True},
    ],
    ids=str,
    keep=(0, 1, 2),
)
def test_means_end_at_the_last_chosen_cluster(
    options: dict[str, Any], chosen: list[int] | None, generator: torch.Generator, device: str
) -> None:
    """Clusters 1, 4 and 5 are empty, and 2 and 3 have tokens; without a choice, tokens count."""
    x = torch.randn(T, D, generator=generator).exp().to(device)
    assignment = torch.tensor([0, 2, 3], device=device).repeat(T)[:T]
    settings = ScaleSettings(**options, **PUBLISHED, mean_over="chosen")
    wide, count = dispersion_and_count(x.double(), assignment, C)
    counted = [True] * 4 + [False] * 2 if chosen is None else [True] * 3 + [False] * 3
    counted = [False] * C if chosen == [0] * C else counted
    mask = torch.tensor(counted, device=device)
    wanted = scale_from_dispersion(wide, count, **options, **PUBLISHED, counted=mask)
    for dtype in (torch.int64, torch.float32, torch.bool):
        given = None if chosen is None else torch.tensor(chosen, device=device).to(dtype)
        scale, _, _ = fused_cluster_scale(x, assignment, C, settings, chosen=given)
        torch.testing.assert_close(scale.double(), wanted, rtol=5e-5, atol=0)
        assert (scale[~mask] == 1).all()
        if chosen is None:
            return
    column = torch.tensor([chosen] * 2, device=device).t()[:, 0]  # not contiguous
    again, _, _ = fused_cluster_scale(x, assignment, C, settings, chosen=column)
    assert torch.equal(again, scale)


@mostly_slow("sets", [None, 2])
def test_dispersion_and_count_go_where_they_are_wanted(
    sets: int | None, generator: torch.Generator, device: str
) -> None:
    leading = () if sets is None else (sets,)
    x = torch.randn(*leading, T, D, generator=generator).to(device)
    assignment = torch.randint(-1, C, (*leading, T), generator=generator).to(device)
    into = (torch.zeros(*leading, C, D, device=device), torch.zeros(*leading, C, device=device))
    scale, spread, count = fused_cluster_scale(x, assignment, C)
    found = fused_cluster_scale(x, assignment, C, into=into)
    assert found[1] is into[0] and found[2] is into[1]
    for one, other in zip(found, (scale, spread, count), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UserError, match="pass contiguous float32"):
        fused_cluster_scale(x, assignment, C, into=(into[0], into[1].double()))


@pytest.mark.parametrize("normalize", ["cluster", "feature", "global"])
def test_clusters_that_tell_nothing_get_ones(normalize: str, device: str) -> None:
    """Equal tokens, a token that is not finite, one token, no token; only cluster 0 informs."""
    x = torch.ones(9, 4, device=device)
    x[0:2] = torch.tensor([[0.0, 0, 0, 0], [2, 4, 8, 16]], device=device)
    x[5, 0] = float("nan")
    assignment = torch.tensor([0, 0, 1, 1, 2, 2, 3, -1, -1], device=device)
    scale, spread, count = fused_cluster_scale(x, assignment, 5, ScaleSettings(normalize=normalize))
    assert count.tolist() == [2, 2, 2, 1, 0]
    assert spread[0].tolist() == [1, 2, 4, 8]
    assert spread[2].isnan().all()
    assert (scale[1:] == 1).all()
    # 1/s = (8, 4, 2, 1) / 8 averages 15/32; alone in its feature a weight averages itself.
    wanted = [32 / 15, 16 / 15, 8 / 15, 4 / 15] if normalize != "feature" else [1.0] * 4
    assert scale[0].tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_scale_does_not_depend_on_the_unit(size: float, device: str) -> None:
    # s = (1, 2) * size, so 1/s is (4/3, 2/3) of its mean.
    x = size * torch.tensor([[0.0, 0.0], [2.0, 4.0]], device=device)
    scale, _, _ = fused_cluster_scale(x, torch.zeros(2, device=device).long(), 1)
    assert scale[0].tolist() == pytest.approx([4 / 3, 2 / 3], rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"normalize": "global", "clamp": 2.0, **PUBLISHED}])
def test_no_tokens_leave_the_plain_router(options: dict[str, Any], device: str) -> None:
    x = torch.empty(2, 0, D, device=device, dtype=torch.bfloat16)
    scale, spread, count = fused_cluster_scale(
        x, torch.empty(2, 0, device=device).long(), C, ScaleSettings(**options)
    )
    assert scale.shape == (2, C, D) and (scale == 1).all()
    assert (spread == 0).all() and (count == 0).all()


def test_the_statistics_carry_no_gradient(device: str) -> None:
    x = torch.randn(5, 3, device=device, requires_grad=True)
    results = fused_cluster_scale(x, torch.zeros(5, device=device).long(), 1)
    assert not any(result.requires_grad for result in results)


def test_the_op_is_well_formed(generator: torch.Generator, device: str) -> None:
    x = torch.randn(1, 9, 3, generator=generator).to(device)
    assignment = torch.zeros(1, 9, device=device).long()
    places = (torch.empty(2, 3, device=device), torch.empty(2, device=device))
    args = (x, assignment, None, None, *places, "mad", "cluster", 1e-3, 0.0, None, 2, False, "all")
    torch.library.opcheck(scale_op, args, test_utils=("test_schema", "test_faketensor"))


def test_what_has_no_kernel_is_refused(device: str) -> None:
    x, assignment = torch.ones(4, 2, device=device), torch.zeros(4, device=device).long()
    with pytest.raises(UserError, match="iqr"):
        fused_cluster_scale(x, assignment, 1, ScaleSettings(measure="iqr"))
    with pytest.raises(UserError, match="rows"):
        fused_cluster_scale(x, assignment, 1, ScaleSettings(normalize="rows"))


def test_the_presets_of_the_published_code_have_a_kernel_and_strength_has_none(
    device: str,
) -> None:
    x, assignment = torch.ones(4, 2, device=device), torch.zeros(4, device=device).long()
    for name in ("paper", "reference-lm", "reference-swin", "reference-soft"):
        options = scale_options(AdaptiveConfig.preset(name))
        assert measure_scale.reasons(x, assignment, 1, options, measure="mad")["triton"] is None
    told = measure_scale.reasons(x, assignment, 1, options._replace(strength=0.5), measure="mad")[
        "triton"
    ]
    assert told is not None and "the optimum of a given strength" in told
