"""Configs of adversarial attacks: method, radius, input space, and the images to attack."""

import math
from dataclasses import InitVar, dataclass
from fractions import Fraction
from typing import ClassVar, Literal, get_args

from acmoe.config.images.data import Capacity, Order, check_batches, checked_capacity
from acmoe.config.routing import Statistics
from acmoe.config.updates import Precision
from acmoe.errors import UserError, check, check_choice, check_positive


@dataclass(frozen=True, kw_only=True)
class FGSMConfig:
    """FGSM: one step of length eps along the sign of the gradient."""

    name: ClassVar[str] = "fgsm"


@dataclass(frozen=True, kw_only=True)
class PGDConfig:
    """PGD: many small steps along the sign of the gradient, from a random start in the eps-ball."""

    name: ClassVar[str] = "pgd"
    steps: int = 20  # gradient steps
    step_size: float = 0.15  # as a fraction of eps
    random_start: bool = True  # begin at a random point of the eps-ball

    def __post_init__(self) -> None:
        check(self.steps >= 1, f"steps={self.steps}; it must be at least 1")
        check_positive(self.step_size, "step_size")


@dataclass(frozen=True, kw_only=True)
class SPSAConfig:
    """SPSA: Adam on a gradient estimated from logits alone (Uesato et al. 2018)."""

    name: ClassVar[str] = "spsa"
    steps: int = 20  # steps of Adam on estimated gradients
    directions: int = 128  # Rademacher directions per estimate, two forward passes each
    delta: float = 0.01  # step along each direction, for finite differences
    lr: float = 0.01  # learning rate of Adam
    # The point at which the gradient is estimated: the current iterate, or ("double") twice the
    # clean image. The code behind the paper's figures takes the latter by mistake, so that its
    # estimate never depends on the perturbation.
    estimate_at: Literal["iterate", "double"] = "iterate"
    # Copies of the batch in one forward pass. With 1, the attack sees exactly the batch that is
    # scored, which matters where batch statistics or expert capacities couple images.
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
    """AutoAttack: the ensemble of the `autoattack` package, which must be installed."""

    name: ClassVar[str] = "autoattack"
    version: Literal["standard", "plus", "rand"] = "standard"  # the set of attacks that it runs
    # The package attacks shrinking parts of a batch and keeps what fooled the model there. Where
    # images of a batch influence each other (batch statistics, expert capacities), such an image
    # may be classified correctly again in the batch that is scored, and the attack looks weaker
    # than it is. That is refused unless this is true.
    allow_coupled: bool = False

    def __post_init__(self) -> None:
        check_choice(self.version, ("standard", "plus", "rand"), "version")


AnyAttack = FGSMConfig | PGDConfig | SPSAConfig | AutoAttackConfig
ATTACKS: dict[str, type[AnyAttack]] = {
    config.name: config for config in (FGSMConfig, PGDConfig, SPSAConfig, AutoAttackConfig)
}


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """One attack at several radii. The report repeats every setting that its figures depend on."""

    attack: AnyAttack  # the attack and its options
    eps: tuple[float, ...]  # radii in the maximum norm, in units of `space`
    space: Literal["pixel", "normalized"] = "pixel"  # [0, 1], or normalised as model input
    clamp: bool = True  # keep attacked images within the range of valid images
    labels: Literal["true", "predicted"] = "true"  # the class the attack moves away from
    # Precision of the attack's gradients. Images are always scored in fp32: between 1 and 2 the
    # bf16 numbers lie 1/128 apart, so a radius of 1/255 would be rounded away.
    precision: Precision = "fp32"
    split: Literal["valid", "test"] = "test"  # the images that are attacked
    statistics: Statistics | None = None  # statistics mode of adaptive routers; None: the model's
    capacity: Capacity = None  # capacity factor of the experts; None: no token is dropped
    dropless: InitVar[bool | None] = None  # old spelling of `capacity`
    batch: int = 64  # images attacked and scored together
    # Shuffled: batches mix classes; stored: file order, often sorted by class.
    order: Order = "shuffled"
    seed: int = 0  # draws the image order, random starts and SPSA directions
    limit: int | None = None  # attack only the first `limit` images of that order; None: all

    def __post_init__(self, dropless: bool | None) -> None:
        object.__setattr__(self, "capacity", checked_capacity(self.capacity, dropless))
        check(
            isinstance(self.attack, AnyAttack),
            f"attack={self.attack!r} is no attack; choose one of {', '.join(ATTACKS)}",
        )
        check(len(self.eps) > 0, "eps is empty; give at least one radius, such as 1/255")
        for eps in self.eps:
            check_positive(eps, "eps")
            check(self.space == "normalized" or eps <= 1, _too_large(eps))
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
            check_choice(self.statistics, get_args(Statistics), "statistics")
        check_batches(self.batch, self.order, self.limit, self.seed)
        check(
            not isinstance(self.attack, AutoAttackConfig)
            or (self.space == "pixel" and self.clamp and self.labels == "true"),
            "autoattack knows only space=pixel, clamp=true and labels=true; use those",
        )


def _too_large(eps: float) -> str:
    """Return the complaint about a radius in pixels above 1, which may be meant in grey levels."""
    levels = eps * 255
    meant = f"; did you mean {eps:g}/255?" if eps <= 255 and eps == round(eps) else ""
    whole = not meant and eps < 100 and math.isclose(levels, round(levels))
    named = f" ({levels:.0f}/255)" if whole else ""
    return f"eps={eps:g}{named}; it must be above 0 and at most 1, the range of pixels{meant}"


def attack_config(
    name: str, *, preset: str = "default", eps: tuple[float, ...] = ()
) -> AttackConfig:
    """Return the config of an attack by name, with the preset's radii unless `eps` is given.

    default   images in [0, 1], true labels, correct SPSA, no token dropped
    paper     the settings behind the paper's figures: normalised images, not clamped to the range
              of valid images, away from the model's own prediction, SPSA with radius 1, and the
              experts' capacity of training (1.25 in the paper's Swin)
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
        attack=attack,
        eps=eps or usual,
        space="normalized",
        clamp=False,
        labels="predicted",
        capacity="model",
    )


def parse_eps(text: str) -> float:
    """Parse a radius written as a number or a fraction: `0.01`, `1/255`."""
    try:
        value = float(Fraction(text.strip()))
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"eps={text!r} is no number; write one such as 0.01 or 1/255") from error
    check_positive(value, "eps")
    return value


def eps_text(eps: float) -> str:
    """Format a radius: as `1/255` where it is a whole number of grey levels, else as a number."""
    levels = round(eps * 255)
    return f"{levels}/255" if 0 < levels < 255 and math.isclose(eps * 255, levels) else f"{eps:g}"
