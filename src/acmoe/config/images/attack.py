"""What an adversary may do: which attack, how far, in which space, and on which images."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from acmoe.config.images.data import Order, check_batches
from acmoe.config.routing import Statistics
from acmoe.errors import UserError, check, check_choice, check_positive


@dataclass(frozen=True, kw_only=True)
class FGSMConfig:
    """One step along the sign of the gradient."""

    name: ClassVar[str] = "fgsm"


@dataclass(frozen=True, kw_only=True)
class PGDConfig:
    """Many small steps along the sign of the gradient, from a random start in the ball."""

    name: ClassVar[str] = "pgd"
    steps: int = 20
    step_size: float = 0.15  # as a share of eps
    random_start: bool = True

    def __post_init__(self) -> None:
        check(self.steps >= 1, f"steps={self.steps}; it must be at least 1")
        check_positive(self.step_size, "step_size")


@dataclass(frozen=True, kw_only=True)
class SPSAConfig:
    """Adam on a gradient estimated from the classifier's answers alone (Uesato et al. 2018)."""

    name: ClassVar[str] = "spsa"
    steps: int = 20
    directions: int = 128  # Rademacher directions of one estimate, two forward passes each
    delta: float = 0.01  # how far an image is moved along a direction
    lr: float = 0.01
    # Where the estimate is taken: at the current image, or, as the code behind the paper's figures
    # does by mistake, at twice the clean image, so that it never sees the perturbation.
    estimate_at: Literal["iterate", "double"] = "iterate"
    # Copies of the batch in one forward pass. One keeps the batch the classifier is scored on,
    # which matters where batch statistics or capacities couple its images.
    copies: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "directions", "copies"):
            value = getattr(self, name)
            check(value >= 1, f"{name}={value}; it must be at least 1")
        check_positive(self.delta, "delta")
        check_positive(self.lr, "lr")
        check_choice(self.estimate_at, ("iterate", "double"), "estimate_at")


@dataclass(frozen=True, kw_only=True)
class AutoAttackConfig:
    """The ensemble of the `autoattack` package, which must be installed."""

    name: ClassVar[str] = "autoattack"
    version: Literal["standard", "plus", "rand"] = "standard"

    def __post_init__(self) -> None:
        check_choice(self.version, ("standard", "plus", "rand"), "version")


AnyAttack = FGSMConfig | PGDConfig | SPSAConfig | AutoAttackConfig
ATTACKS: dict[str, type[AnyAttack]] = {
    config.name: config for config in (FGSMConfig, PGDConfig, SPSAConfig, AutoAttackConfig)
}


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """A sweep of one attack over radii. Whatever a figure depends on stands in the report again."""

    attack: AnyAttack
    eps: tuple[float, ...]  # radii in the maximum norm, in units of the space
    space: Literal["pixel", "normalized"] = "pixel"  # [0, 1], or what the classifier reads
    clamp: bool = True  # stay within the range of images
    labels: Literal["true", "predicted"] = "true"  # what the attack moves away from
    # Of the gradients an attack follows. Images are always scored in fp32: between 1 and 2 the
    # numbers of bf16 lie 1/128 apart, and a radius of 1/255 would be rounded away.
    precision: Literal["fp32", "bf16"] = "fp32"
    split: Literal["valid", "test"] = "test"
    statistics: Statistics | None = None  # mode of the adaptive routers; None: the model's own
    dropless: bool = False  # lift the experts' capacity, so that no token is dropped
    batch: int = 64
    order: Order = "shuffled"
    seed: int = 0  # of the order, the starts and the directions
    limit: int | None = None  # attack this many images only, the first in the order

    def __post_init__(self) -> None:
        check(
            isinstance(self.attack, AnyAttack),
            f"attack={self.attack!r} is no attack; choose one of {', '.join(ATTACKS)}",
        )
        check(len(self.eps) > 0, "eps is empty; give at least one radius, such as 1/255")
        for eps in self.eps:
            check_positive(eps, "eps")
            check(
                self.space == "normalized" or eps <= 1,
                f"eps={eps:g} exceeds the whole range of pixels, 1; did you mean {eps:g}/255?",
            )
        check(
            len(set(self.eps)) == len(self.eps),
            f"eps={', '.join(map(eps_text, self.eps))} names a radius twice; leave one out",
        )
        check_choice(self.space, ("pixel", "normalized"), "space")
        check_choice(self.labels, ("true", "predicted"), "labels")
        check_choice(self.precision, ("fp32", "bf16"), "precision")
        check(
            self.precision == "fp32" or isinstance(self.attack, FGSMConfig | PGDConfig),
            f"precision={self.precision} is for gradients; {self.attack.name} compares answers, "
            "whose differences it would round away: use fp32",
        )
        check_choice(self.split, ("valid", "test"), "split")
        if self.statistics is not None:
            modes = ("batch", "running", "prefix", "sequence")
            check_choice(self.statistics, modes, "statistics")
        check_batches(self.batch, self.order, self.limit, self.seed)
        check(
            not isinstance(self.attack, AutoAttackConfig)
            or (self.space == "pixel" and self.clamp and self.labels == "true"),
            "autoattack knows only space=pixel, clamp=true and labels=true; use those",
        )


def attack_config(
    name: str, *, preset: str = "default", eps: tuple[float, ...] = ()
) -> AttackConfig:
    """An attack with a preset's settings, at its usual radii unless others are given.

    default   pixels in [0, 1], true labels, a correct SPSA
    paper     as the paper's figures were made: on normalised images, without a bound to the range
              of images, away from the model's own prediction, SPSA with radius 1
    """
    check_choice(name, tuple(ATTACKS), "attack")
    check_choice(preset, ("default", "paper"), "preset")
    attack = ATTACKS[name]()
    if preset == "default":
        usual = (1 / 255, 8 / 255) if name == "spsa" else (1 / 255,)
        return AttackConfig(attack=attack, eps=eps or usual)
    if name == "autoattack":
        raise UserError("the paper does not use autoattack; leave out preset=paper")
    usual = (1.0,) if name == "spsa" else (1 / 255,)
    return AttackConfig(
        attack=attack, eps=eps or usual, space="normalized", clamp=False, labels="predicted"
    )


def parse_eps(text: str) -> float:
    """A radius written as a number or a fraction: `0.01`, `1/255`."""
    try:
        value = float(Fraction(text.strip()))
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"eps={text!r} is no number; write one such as 0.01 or 1/255") from error
    check_positive(value, "eps")
    return value


def eps_text(eps: float) -> str:
    """`1/255` where the radius is a whole number of grey levels, else a short number."""
    levels = round(eps * 255)
    return f"{levels}/255" if 0 < levels < 255 and math.isclose(eps * 255, levels) else f"{eps:g}"
