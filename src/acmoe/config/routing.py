"""Configs of the routers. A name such as "adaptive" means the defaults of its config.

The two routers that rescale their input are here, the others in base_routers.py.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

from acmoe.config.annotations import check_types, named_configs
from acmoe.config.base_routers import (
    BaseConfig,
    CosineConfig,
    CustomConfig,
    ExpertChoiceConfig,
    HashConfig,
    LossConfig,
    MetricConfig,
    SMoEConfig,
    SoftConfig,
    StableConfig,
    ThresholdConfig,
)
from acmoe.config.moved import WithMovedFields, import_hint
from acmoe.config.presets import PRESETS
from acmoe.config.scale_codes import (
    CLUSTERS,
    MEASURES,
    MODES,
    NORMALIZATIONS,
    SCALES,
    scale_codes,
)
from acmoe.errors import UserError, check, check_choice, check_not_negative, check_positive

Statistics = Literal["batch", "running", "prefix", "sequence"]
Measure = Literal["mad", "variance", "std", "gini", "iqr"]

__all__ = [
    "ROUTERS",
    "AdaptiveConfig",
    "BaseConfig",
    "CosineConfig",
    "CustomConfig",
    "ExpertChoiceConfig",
    "HashConfig",
    "LossConfig",
    "MetricConfig",
    "RandomConfig",
    "RouterConfig",
    "SMoEConfig",
    "SoftConfig",
    "StableConfig",
    "ThresholdConfig",
    "base_router",
    "check_choice",
    "check_not_negative",
    "router_config",
]


class Modes(NamedTuple):
    """The statistics modes of a router in training and in evaluation."""

    train: Statistics
    evaluation: Statistics

    def when(self, *, training: bool) -> Statistics:
        """Return the mode of a module in training mode, or in evaluation mode."""
        return self.train if training else self.evaluation


def _check_base(base: object) -> None:
    check(
        isinstance(base, BaseConfig) and not isinstance(base, HashConfig),
        f"base={base!r} cannot be rescaled; choose a config of a router that reads its input: "
        "SMoEConfig, MetricConfig, CosineConfig, StableConfig, ThresholdConfig, "
        "ExpertChoiceConfig, SoftConfig",
    )


@dataclass(frozen=True, kw_only=True)
class RandomConfig:
    """The paper's ablation: a random scale, N(1, std) clipped at 0, drawn for each cluster."""

    name: ClassVar[str] = "random"
    # Options of an adaptive router that are fixed for a random scale.
    detach: ClassVar[bool] = True
    mean_over: ClassVar[str] = "all"
    base: BaseConfig = SMoEConfig()  # the router that reads the scaled tokens
    std: float = 0.5  # standard deviation of the scale
    mix: int = 1  # clusters whose scales are averaged by affinity (Mix-k)

    def __post_init__(self) -> None:
        _check_base(self.base)
        check_types(self)
        check_not_negative(self.std, "std")
        check(self.mix >= 1, f"mix={self.mix}; it must be at least 1")

    @property
    def origin_shape(self) -> tuple[int, ...]:
        """Return the shape of `RoutingState.origin` in a state that is made for this router."""
        return 0, CLUSTERS, 1


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(WithMovedFields):
    """The adaptive clustering router: a base router that reads tokens rescaled by M.

    M weights each feature by 1/s, where s is the spread of the token's cluster on that feature.
    `statistics` selects the tokens over which s is measured, `measure` how, and `base` the router
    that reads the rescaled tokens. Comments in the source, which are also the page of configs,
    explain every field. `AdaptiveConfig.preset("paper")` has the paper's choices.
    """

    name: ClassVar[str] = "adaptive"
    # Fields that a model is built with; all others are read at every call.
    built_with: ClassVar[tuple[str, ...]] = ("base", "mix", "scale_experts")
    # Fields that do not enter the scale which a previous layer computes, or are compared elsewhere.
    outside_scale: ClassVar[tuple[str, ...]] = (
        *("base", "mix", "scale_experts", "statistics_of", "detach", "prior_tokens"),
    )
    base: BaseConfig = SMoEConfig()  # the router that reads the rescaled tokens
    # Measure of a cluster's spread on a feature; mad: mean absolute deviation, the paper's.
    measure: Measure = "mad"
    # The tokens that a spread is measured over. batch: all of the call (the paper; not causal).
    # running: an average over past optimizer steps. prefix: the sequence up to the token itself.
    # sequence: the whole sequence.
    statistics: Statistics = "running"
    eval_statistics: Statistics | None = None  # the mode in evaluation; None: as in training
    # The layer whose router inputs are measured: the previous MoE layer (the paper), or this one
    # (the published code). None: previous, but current for prefix and sequence, which need
    # positions.
    statistics_of: Literal["previous", "current"] | None = None
    # The processes whose tokens are measured in data parallel training. pooled: each measures its
    # own tokens, and one reduction per step updates the running averages with all of them. global:
    # every measurement is over the tokens of all processes, as one process would make it. local:
    # nothing is exchanged.
    statistics_group: Literal["local", "pooled", "global"] = "pooled"
    # The weights whose mean is set to one: a cluster's over features (the proof of Lemma 1), a
    # feature's over clusters, or all of them.
    normalize: Literal["cluster", "feature", "global"] = "cluster"
    strength: float | None = None  # lambda of Theorem 1; None: the paper's 1/s
    mix: int = 1  # clusters whose scales are averaged by affinity (Mix-k)
    detach: bool = True  # True: no gradient flows through the scale
    scale_experts: bool = False  # feed the scaled token to the experts too (published vision code)
    floor: float = 1e-3  # lower bound of each s, as a share of its cluster's mean s
    eps: float = 0.0  # weights are 1 / (s + eps)
    # Upper bound of a weight, as a multiple of the mean weight of all clusters. prefix: of the
    # `mix` clusters that the token reads.
    clamp: float | None = None
    # Divide by the mean of the weights before the clamp, as the published vision code for Swin; the
    # clamped weights then average less than one.
    mean_before_clamp: bool = False
    min_tokens: int = 2  # clusters of fewer tokens get scale 1
    # Clusters in the means that `clamp` and `normalize` take over clusters: all, or, as in the
    # published code, those numbered up to the highest expert that any token chose. It matters where
    # empty clusters count (min_tokens=0).
    mean_over: Literal["all", "chosen"] = "all"
    momentum: float = 0.99  # factor on the weight of past tokens, at each optimizer step
    prior_tokens: float = 16.0  # prefix: the running dispersion counts as this many tokens

    def __post_init__(self) -> None:
        _check_base(self.base)
        check_types(self)
        check_choice(self.measure, MEASURES, "measure")
        check_choice(self.statistics, MODES, "statistics")
        if self.eval_statistics is not None:
            check_choice(self.eval_statistics, MODES, "eval_statistics")
        if self.statistics_of is not None:
            check_choice(self.statistics_of, ("previous", "current"), "statistics_of")
        check_choice(self.statistics_group, ("local", "pooled", "global"), "statistics_group")
        check_choice(self.normalize, NORMALIZATIONS, "normalize")
        if self.strength is not None:
            check_positive(self.strength, "strength")
        check(self.mix >= 1, f"mix={self.mix}; it must be at least 1")
        check_not_negative(self.floor, "floor")
        check_not_negative(self.eps, "eps")
        if self.clamp is not None:
            check_positive(self.clamp, "clamp")
        check(self.min_tokens >= 0, f"min_tokens={self.min_tokens}; it must be 0 or more")
        check_choice(self.mean_over, ("all", "chosen"), "mean_over")
        check(0 <= self.momentum < 1, f"momentum={self.momentum}; it must lie in [0, 1)")
        check_not_negative(self.prior_tokens, "prior_tokens")
        self._check_together()
        self._compute()

    def _compute(self) -> None:
        # Computed early, because torch.compile can trace neither a checksum nor a cache.
        _ = self.modes, self.reads, self.scale_codes, self.origin_shape

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields of a pickle; computed values have other forms in other versions."""
        names = {one.name for one in fields(self)}
        self.__dict__.update({name: value for name, value in state.items() if name in names})
        self._compute()

    def _check_together(self) -> None:
        positional = [mode for mode in self.modes if mode in ("prefix", "sequence")]
        check(
            not positional or self.reads == "current",
            f"statistics={positional and positional[0]!r} belongs to the reader's own positions; "
            "use statistics_of='current'",
        )
        if "prefix" in self.modes:
            self._check_prefix()
        if self.statistics_group == "global":
            self._check_global()
        check(
            self.floor > 0 or self.eps > 0,
            "floor=0 and eps=0 divide by a zero dispersion; make one of them positive",
        )
        check(
            self.min_tokens > 0 or self.eps > 0,
            "min_tokens=0 takes 1/s of empty clusters; it needs eps > 0",
        )

    def _check_prefix(self) -> None:
        check(
            self.measure in ("mad", "variance", "std"),
            f"measure={self.measure!r} has no causal form of bounded memory; with "
            "statistics='prefix' choose one of mad, variance, std",
        )
        check(
            self.normalize == "cluster",
            f"normalize={self.normalize!r} compares clusters, of which a token in "
            "statistics='prefix' reads only its own; use normalize='cluster'",
        )
        check(
            self.mean_over == "all",
            f"mean_over={self.mean_over!r} counts clusters, of which a token in "
            "statistics='prefix' reads only its own; use mean_over='all'",
        )

    def _check_global(self) -> None:
        check(
            self.measure in ("mad", "variance", "std"),
            f"measure={self.measure!r} needs all tokens sorted in one process; with "
            "statistics_group='global' choose one of mad, variance, std, or use 'pooled'",
        )
        check(
            self.detach,
            "detach=False needs a gradient through the exchange between processes, which "
            "statistics_group='global' has not; use 'pooled'",
        )

    @cached_property
    def modes(self) -> Modes:
        return Modes(self.statistics, self.eval_statistics or self.statistics)

    @cached_property
    def reads(self) -> Literal["previous", "current"]:
        """Return `statistics_of`, with None replaced by its default."""
        if self.statistics_of is not None:
            return self.statistics_of
        return "current" if {"prefix", "sequence"} & set(self.modes) else "previous"

    @cached_property
    def scale_codes(self) -> tuple[int, ...]:
        """Return numbers that say how the scale is measured, to compare two configs by."""
        return scale_codes(self)

    @cached_property
    def origin_shape(self) -> tuple[int, ...]:
        """Return the shape of `RoutingState.origin` in a state that is made for this router."""
        if self.reads == "previous":
            return 0, SCALES, int(self.detach), *self.scale_codes
        # 1 if no gradient flows through the weights of a token's clusters.
        codes = (0, CLUSTERS, int(self.mix == 1 or self.detach))
        return codes if self.mean_over == "all" else (*codes, 1)

    @classmethod
    def preset(cls, name: str) -> "AdaptiveConfig":
        """Return a preset: paper, reference-lm, reference-swin or reference-soft.

        The last three have the constants of the published code: statistics of the current layer's
        input, eps and clamp for small dispersions. An empty cluster counts as s = 0 there, unless
        its expert has a higher number than every expert that a token chose.
        """
        check(name in PRESETS, f"preset={name!r} is unknown; choose one of {', '.join(PRESETS)}")
        return AdaptiveConfig(**PRESETS[name])

    def overridden(self, **changes: Any) -> Self:
        """Return this config with fields changed, for a model that is already built."""
        return replace(self, **changes)


RouterConfig = BaseConfig | RandomConfig | AdaptiveConfig

ROUTERS: dict[str, type[RouterConfig]] = {
    config.name: config
    for config in (
        SMoEConfig,
        AdaptiveConfig,
        CosineConfig,
        StableConfig,
        RandomConfig,
        ThresholdConfig,
        SoftConfig,
        HashConfig,
        ExpertChoiceConfig,
        MetricConfig,
    )
}


def router_config(router: str | RouterConfig) -> RouterConfig:
    """Return the config itself, or the default config of the router of that name."""
    if isinstance(router, RouterConfig):
        return router
    if not isinstance(router, str):
        raise UserError(
            f"router={router!r} is no config of a router; pass a name, a config such as "
            "acmoe.AdaptiveConfig(...), or an instance of your own subclass of acmoe.CustomConfig"
        )
    known = {**ROUTERS, **named_configs(CustomConfig)}
    if router not in known:
        raise UserError(
            f"router={router!r} is unknown; choose one of {', '.join(known)}{import_hint(router)}"
        )
    return known[router]()


def base_router(router: RouterConfig) -> RouterConfig:
    """Return the router that an adaptive or random-scale router wraps; any other one as it is."""
    return router.base if isinstance(router, AdaptiveConfig | RandomConfig) else router
