"""No image changes another's logits in an evaluation, unless a capacity or batch statistics do."""

import pytest
import torch
from torch import Tensor, nn

from acmoe import create_model
from acmoe.attacks.coupling import coupled_by
from acmoe.config.images.attack import AttackConfig, FGSMConfig
from acmoe.config.images.data import Capacity, ImageEvaluateConfig
from acmoe.evaluate.images.capacity import capacity_text, using_capacity
from acmoe.evaluate.statistics import using_statistics
from acmoe.routing.statistics import ClusterStatistics
from acmoe.runtime import evaluating
from slow_cases import mostly_slow
from vision_cases import TinyMoE, seeded_model

KINDS = [("swin-nano", "smoe"), ("swin-nano", "adaptive")]
SOFT = [("softmoe-nano", "soft"), ("softmoe-nano", "adaptive")]


def model_of(name: str, router: str) -> nn.Module:
    """A model with running statistics as training leaves them: far from the identity."""
    model = seeded_model(lambda: create_model(name, router=router))
    draws = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, ClusterStatistics):
            module.dispersion.uniform_(0.2, 2.0, generator=draws)
            module.weight.fill_(100.0)
    for parameter in model.parameters():
        parameter.data *= 3  # logits of about 1
    return model


@torch.no_grad()
def change(model: nn.Module, capacity: Capacity, statistics: str | None = None) -> Tensor:
    """Return how far the first image's logits move if the 15 others are replaced."""
    draws = torch.Generator().manual_seed(2)
    one = torch.randn(1, 3, 32, 32, generator=draws)
    # The others prefer the same experts, so that they compete with it.
    others = [one + s * torch.randn(15, 3, 32, 32, generator=draws) for s in (0.1, 1.0)]
    with (
        using_capacity(model, capacity),
        using_statistics(model, statistics),
        evaluating(model),
    ):
        first, second = (model(torch.cat([one, rest])).logits[0] for rest in others)
    assert first.abs().max() > 0.1
    return (first - second).abs().max()


@pytest.mark.parametrize(("name", "router"), KINDS + SOFT)
def test_other_images_change_logits_by_rounding_alone(name: str, router: str) -> None:
    model = model_of(name, router)
    for default in (ImageEvaluateConfig(), AttackConfig(attack=FGSMConfig(), eps=(0.1,))):
        assert default.capacity is None
    assert change(model, ImageEvaluateConfig().capacity) < 1e-4
    with using_capacity(model, None):
        assert coupled_by(model) == {}


@mostly_slow(
    ("name", "router", "capacity"),
    [(*kind, capacity) for kind in KINDS for capacity in ("model", 1.25)],
    keep={0, 3},
)
def test_with_the_papers_capacity_other_images_do_change_them(
    name: str, router: str, capacity: Capacity
) -> None:
    model = model_of(name, router)
    assert change(model, capacity) > 0.01
    assert coupled_by(model) == {"an expert capacity of 1.25": "capacity=none"}


@pytest.mark.parametrize("name", ["swin-nano", "softmoe-nano"])
def test_with_statistics_of_the_batch_other_images_do_change_them(name: str) -> None:
    model = model_of(name, "adaptive")
    assert change(model, None, "batch") > 1e-3
    with using_capacity(model, None), using_statistics(model, "batch"):
        assert coupled_by(model) == {"batch statistics": "statistics=running"}


def test_other_causes_of_coupling_are_found() -> None:
    assert "batch" in next(iter(coupled_by(TinyMoE("expert-choice"))))
    assert coupled_by(nn.Sequential(nn.BatchNorm2d(3))) == {}
    assert list(coupled_by(nn.BatchNorm2d(3, track_running_stats=False))) == [
        "a batch normalisation without running averages"
    ]


def test_a_capacity_in_words() -> None:
    words = [capacity_text(factor) for factor in (None, 1.25, 2.0)]
    assert words == ["none", "1.25 (the paper's)", "2"]
