"""AutoAttack is left to its package, and what that returns is kept within the ball."""

import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from acmoe.attacks.attack import perturb
from acmoe.attacks.target import Target
from acmoe.config.images.attack import AutoAttackConfig
from acmoe.errors import UserError
from vision_cases import BATCH_STATISTICS, Linear, TinyMoE, seeded_model


class Adversary:
    """Stands for the package's class: remembers how it was built, and goes too far."""

    made: ClassVar[list["Adversary"]] = []

    def __init__(self, model: Any, **settings: Any) -> None:
        self.model, self.settings = model, settings
        Adversary.made.append(self)

    def run_standard_evaluation(self, x: Tensor, y: Tensor, bs: int) -> Tensor:
        assert self.model(x).shape == (bs, 10) and len(y) == bs
        return x + 2.0


@pytest.fixture
def adversaries(monkeypatch: pytest.MonkeyPatch) -> list[Adversary]:
    """All that are built, with `Adversary` in the place of the package."""
    package = ModuleType("autoattack")
    package.AutoAttack = Adversary  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autoattack", package)
    made: list[Adversary] = []
    monkeypatch.setattr(Adversary, "made", made)
    return made


def target() -> tuple[Target, Tensor, Tensor]:
    found = Target(seeded_model(lambda: Linear(10, 8)), mean=(0.5,) * 3, std=(0.5,) * 3)
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    return found, found.enter(images), torch.tensor([1, 2, 3])


def test_the_package_gets_the_classifier_in_pixels_and_its_answer_is_projected(
    adversaries: list[Adversary],
) -> None:
    classifier, x, labels = target()
    attack = AutoAttackConfig(version="plus")
    found = perturb(classifier, x, labels, 0.1, attack, seed=(1 << 40) + 5)
    torch.testing.assert_close(found, (x + 0.1).clamp(max=1))
    (adversary,) = adversaries
    settings = adversary.settings
    assert (settings["norm"], settings["eps"], settings["version"]) == ("Linf", 0.1, "plus")
    assert settings["seed"] == 5 and settings["device"] == x.device


def test_images_that_influence_each_other_are_refused_unless_allowed(
    adversaries: list[Adversary],
) -> None:
    model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS, capacity=1.25))
    coupled = Target(model, mean=(0.5,) * 3, std=(0.5,) * 3)
    _, x, labels = target()
    with pytest.raises(UserError, match="use capacity=none and statistics=running, or allow") as no:
        perturb(coupled, x, labels, 0.1, AutoAttackConfig(), seed=0)
    assert "an expert capacity of 1.25 and batch statistics couple" in str(no.value)
    assert not adversaries
    perturb(coupled, x, labels, 0.1, AutoAttackConfig(allow_coupled=True), seed=0)
    assert len(adversaries) == 1


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "autoattack", None)
    classifier, x, labels = target()
    with pytest.raises(UserError, match=r"needs the autoattack package: pip install git\+https"):
        perturb(classifier, x, labels, 0.1, AutoAttackConfig(), seed=0)
