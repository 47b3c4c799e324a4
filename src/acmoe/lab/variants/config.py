"""The adaptive router's options beyond the paper. With their defaults it is the paper's."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

from acmoe.config.moved import VARIANT, VARIANT_FIELDS
from acmoe.config.routing import AdaptiveConfig, SMoEConfig
from acmoe.errors import check, check_choice, check_positive

Part = Literal["both", "common", "own"]
StatsInput = Literal["input", "standardized", "residual"]


@dataclass(frozen=True, kw_only=True)
class VariantConfig(AdaptiveConfig):
    """Variants of the scale, of the tokens it stretches, and of the tokens it is measured on."""

    name: ClassVar[str] = VARIANT
    built_with: ClassVar[tuple[str, ...]] = (
        *AdaptiveConfig.built_with,
        *("center", "match", "learn_strength", "strength_end", "fade_steps", "distance"),
    )
    outside_scale: ClassVar[tuple[str, ...]] = (*AdaptiveConfig.outside_scale, "center", "match")
    # Exponent of M, which is then normalised to mean one: 1 is the paper's 1/s; towards 0 the
    # router becomes the plain one.
    power: float = 1.0
    # M fades to the identity: its exponent is multiplied by a weight that falls linearly from 1 to
    # 0 in this many optimizer steps. From then on M = I, in evaluation too. None: no fading.
    fade_steps: int | None = None
    # log M is its mean over clusters (common) plus each cluster's difference from it (own). Use
    # both parts or one of them.
    part: Part = "both"
    # M (h - mu) + mu: stretch a token about its cluster's mean mu instead of the origin.
    center: bool = False
    # Divide the inner products of each cluster's tokens with the experts, so that they vary over
    # experts as much as without M: the gate keeps the plain router's temperature.
    match: bool = False
    # Lambda goes from `strength` to `strength_end` in `strength_steps` optimizer steps, by the same
    # factor in each.
    strength_end: float | None = None
    strength_steps: int | None = None  # None: lambda stays at `strength`
    learn_strength: bool = False  # log lambda is a parameter that begins at log(strength)
    gain: bool = True  # False: statistics of tokens before the LayerNorm's gain and bias
    # Statistics of the router's input, which is the output of a LayerNorm, or of that norm's input.
    read: Literal["normed", "residual"] = "normed"
    # Choose the expert nearest in M, by the affinity h' M e_k - e_k' M e_k / 2, instead of Eqn. 8.
    distance: bool = False

    @property
    def stats_input(self) -> StatsInput:
        """Return which tokens are measured: the router's input, or tokens before the norm."""
        if self.read == "residual":
            return "residual"
        return "input" if self.gain else "standardized"

    def overridden(self, **changes: Any) -> Self:
        check(
            "strength" not in changes or not self.learn_strength,
            f"strength={changes.get('strength')} cannot be overridden where it is learned; "
            "leave it out",
        )
        return super().overridden(**changes)

    def _check_together(self) -> None:
        super()._check_together()
        self._check_scale()
        self._check_strength()
        self._check_tokens()
        if self.distance:
            self._check_distance()

    def _check_scale(self) -> None:
        check(
            math.isfinite(self.power) and 0 < self.power <= 1,
            f"power={self.power}; it must lie in (0, 1], and 0 would be router='smoe'",
        )
        check(
            self.fade_steps is None or self.fade_steps >= 1,
            f"fade_steps={self.fade_steps}; it must be at least 1, or None for an M that stays",
        )
        check_choice(self.part, ("both", "common", "own"), "part")
        positional = {"prefix", "sequence"} & set(self.modes)
        check(
            self.part == "both" or not positional,
            f"part={self.part!r} compares clusters that all tokens share; with "
            f"statistics={min(positional, default='')!r} each has scales of its own: use 'running' "
            "or 'batch'",
        )
        paper = self.power == 1 and self.part == "both" and self.fade_steps is None
        check(
            paper or self.mean_over == "all",
            f"mean_over={self.mean_over!r} leaves clusters out of means; power={self.power}, "
            f"part={self.part!r} and fade_steps={self.fade_steps} compare all: use "
            "mean_over='all'",
        )
        check(
            self.part != "common" or self.normalize != "feature",
            "part='common' under normalize='feature' is 1 everywhere, the plain router; use "
            "normalize='cluster'",
        )

    def _check_strength(self) -> None:
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
            self.strength is not None or not changes,
            "strength=None is the paper's 1/s, without a lambda to schedule or learn; give "
            "strength a first value",
        )
        check(
            not (self.learn_strength and self.strength_end is not None),
            "learn_strength and strength_end both move lambda; use one",
        )

    def _check_tokens(self) -> None:
        check_choice(self.read, ("normed", "residual"), "read")
        check(
            self.gain or self.read == "normed",
            "gain=False and read='residual': the residual stream has no gain to leave out; use one",
        )
        check(
            self.stats_input == "input" or self.reads == "previous",
            f"gain={self.gain} and read={self.read!r} are about what a layer hands on; with "
            "statistics_of='current' the router knows its own input alone: use 'previous'",
        )
        check(
            not self.center
            or (self.reads == "current" and set(self.modes) <= {"batch", "running"}),
            "center=True needs means of the very tokens it moves, of this call or of past steps; "
            "use statistics_of='current' with statistics 'batch' or 'running'",
        )
        check(
            not self.match or type(self.base) is SMoEConfig,
            f"match=True compares inner products with expert embeddings; base={self.base.name!r} "
            "has other affinities: use SMoEConfig",
        )
        check(
            not self.match or (self.mix == 1 and not self.scale_experts),
            f"match=True gives each cluster one temperature, for its affinities alone; with "
            f"mix={self.mix} and scale_experts={self.scale_experts} it cannot: use mix=1 and False",
        )

    def _check_distance(self) -> None:
        check(
            type(self.base) is SMoEConfig,
            f"distance=True measures distances to expert embeddings; base={self.base.name!r} has "
            "other affinities: use SMoEConfig",
        )
        check(
            self.mix == 1 and set(self.modes) <= {"batch", "running"},
            f"distance=True needs one M for each cluster; with mix={self.mix} and statistics "
            f"{', '.join(sorted(set(self.modes)))} a token has its own: use mix=1 and 'batch' or "
            "'running'",
        )
        check(
            not (self.center or self.match),
            f"distance=True replaces the affinity that center={self.center} and "
            f"match={self.match} correct; use one",
        )


def variant_of(config: AdaptiveConfig, **changes: Any) -> AdaptiveConfig:
    """Return the config with fields changed; a `VariantConfig` if one of them belongs to it."""
    added = VariantConfig.__dataclass_fields__.keys() - AdaptiveConfig.__dataclass_fields__.keys()
    if isinstance(config, VariantConfig) or not changes.keys() & added:
        return replace(config, **changes)
    own = {field.name: getattr(config, field.name) for field in fields(config)}
    return VariantConfig(**own | changes)


def as_in_0_1(encoded: Any) -> Any:
    """Rewrite encoded configs with adaptive routers as in version 0.1.

    There both classes had the name "adaptive" and all fields but `distance`, `fade_steps` and
    `statistics_group`; a config that uses one of them stays as it is. Studies find their stored
    records by a digest of that form.
    """
    if isinstance(encoded, list):
        return [as_in_0_1(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    found = {key: as_in_0_1(item) for key, item in encoded.items()}
    if found.get("name") not in (AdaptiveConfig.name, VARIANT):
        return found
    later = {
        "distance": False,
        "fade_steps": None,
        "statistics_group": AdaptiveConfig.statistics_group,
    }
    if all(found.get(name, default) == default for name, default in later.items()):
        found = {name: value for name, value in found.items() if name not in later}
        return VARIANT_FIELDS | found | {"name": AdaptiveConfig.name}
    return found
