"""What the mathematics offers an adaptive router beyond the paper. The defaults change nothing."""

import math
from dataclasses import dataclass
from typing import Literal

from acmoe.config.base_routers import BaseConfig, SMoEConfig
from acmoe.errors import check, check_choice, check_positive

Part = Literal["both", "common", "own"]


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Variants of the scale, of what it stretches, and of the tokens it is measured on."""

    # M to this power, mean one again: 1 is the paper's 1/s, towards 0 the plain router.
    power: float = 1.0
    # log M is a mean over clusters (common) plus each one's departure from it (own); keep one.
    part: Part = "both"
    # M (h - mu) + mu: stretch a token about its cluster's mean mu instead of the origin.
    center: bool = False
    # Divide the inner products of each cluster's tokens with the experts, so that they vary over
    # experts as much as without M: the gate keeps the plain router's temperature.
    match: bool = False
    # Lambda goes from `strength` to this along a geometric path of so many optimizer steps.
    strength_end: float | None = None
    strength_steps: int | None = None
    learn_strength: bool = False  # log lambda is a parameter that begins at log(strength)
    gain: bool = True  # False: statistics of tokens before the LayerNorm's gain and bias
    # Statistics of the router's input, which a LayerNorm gave, or of what that LayerNorm read.
    read: Literal["normed", "residual"] = "normed"

    @property
    def source(self) -> Literal["input", "standardized", "residual"]:
        """The tokens statistics are taken of: the router's, or those the layer is handed beside."""
        if self.read == "residual":
            return "residual"
        return "input" if self.gain else "standardized"

    def _check_scale(self, strength: float | None, normalize: str, modes: tuple[str, ...]) -> None:
        check(
            math.isfinite(self.power) and 0 < self.power <= 1,
            f"power={self.power}; it must lie in (0, 1], and 0 would be router='smoe'",
        )
        check_choice(self.part, ("both", "common", "own"), "part")
        positional = {"prefix", "sequence"} & set(modes)
        check(
            self.part == "both" or not positional,
            f"part={self.part!r} compares clusters that all tokens share; with "
            f"statistics={min(positional, default='')!r} each has scales of its own: use 'running' "
            "or 'batch'",
        )
        check(
            self.part != "common" or normalize != "feature",
            "part='common' under normalize='feature' is 1 everywhere, the plain router; use "
            "normalize='cluster'",
        )
        self._check_strength(strength)

    def _check_strength(self, strength: float | None) -> None:
        check(
            (self.strength_end is None) == (self.strength_steps is None),
            f"strength_end={self.strength_end} and strength_steps={self.strength_steps} make one "
            "schedule; give both or neither",
        )
        if self.strength_end is not None and self.strength_steps is not None:
            check_positive(self.strength_end, "strength_end")
            check(
                self.strength_steps >= 1,
                f"strength_steps={self.strength_steps}; it must be at least 1",
            )
        changes = self.learn_strength or self.strength_end is not None
        check(
            strength is not None or not changes,
            "strength=None is the paper's 1/s, without a lambda to schedule or learn; give "
            "strength a first value",
        )
        check(
            not (self.learn_strength and self.strength_end is not None),
            "learn_strength and strength_end both move lambda; use one",
        )

    def _check_tokens(
        self,
        base: BaseConfig,
        modes: tuple[str, ...],
        reads: str,
        *,
        mix: int,
        scale_experts: bool,
    ) -> None:
        check_choice(self.read, ("normed", "residual"), "read")
        check(
            self.gain or self.read == "normed",
            "gain=False and read='residual': the residual stream has no gain to leave out; use one",
        )
        check(
            self.source == "input" or reads == "previous",
            f"gain={self.gain} and read={self.read!r} are about what a layer hands on; with "
            "statistics_of='current' the router knows its own input alone: use 'previous'",
        )
        check(
            not self.center or (reads == "current" and set(modes) <= {"batch", "running"}),
            "center=True needs means of the very tokens it moves, of this call or of past steps; "
            "use statistics_of='current' with statistics 'batch' or 'running'",
        )
        check(
            not self.match or type(base) is SMoEConfig,
            f"match=True compares inner products with expert embeddings; base={base.name!r} "
            "has other affinities: use SMoEConfig",
        )
        check(
            not self.match or (mix == 1 and not scale_experts),
            f"match=True gives each cluster one temperature, for its affinities alone; with "
            f"mix={mix} and scale_experts={scale_experts} it cannot: use mix=1 and False",
        )
