"""The grid of the synthetic study: varied factors, and conditions compared in each setting.

Every setting differs from one base config in the factors that it names. The baseline is `smoe`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from acmoe.config.routing import AdaptiveConfig, MetricConfig, RandomConfig, SMoEConfig
from acmoe.data.synthetic import GaussianClusters
from acmoe.lab.study.synthetic.task import SyntheticConfig
from acmoe.lab.variants import variant_of

Factors = dict[str, Any]
Conditions = dict[str, dict[str, Any]]  # condition -> changed fields of SyntheticConfig

BASE = SyntheticConfig()

# The factors that the theory's gain should depend on; each value changes BASE in one factor.
VARIED: dict[str, tuple[float, ...]] = {
    "contrast": (1.0, 2.0, 32.0),
    "dim": (64,),  # then 48 features have a large spread in every cluster
    "noise": (0.5,),
}

# The paper uses statistics of the current batch.
PREVIOUS = AdaptiveConfig(statistics="batch", statistics_of="previous")
CURRENT = AdaptiveConfig(statistics="batch", statistics_of="current")
SMOE: Conditions = {"smoe": {"router": SMoEConfig()}}
ORACLES: Conditions = {
    "oracle-scale": {"router": PREVIOUS, "oracle": "scale"},
    "oracle-cluster": {"router": PREVIOUS, "oracle": "cluster"},
}
METRIC: Conditions = {"metric": {"router": MetricConfig()}}
RANDOM: Conditions = {"random": {"router": RandomConfig()}}


def adaptive(layers: int) -> Conditions:
    """Return the two interpretations of the paper; with one layer they are the same."""
    both: Conditions = {
        "adaptive-previous": {"router": PREVIOUS},
        "adaptive-current": {"router": CURRENT},
    }
    return both if layers == 2 else {"adaptive-current": both["adaptive-current"]}


def variants(layers: int) -> Conditions:
    """Return variants of the adaptive router that might improve it, each with one change."""
    changes: dict[str, dict[str, Any]] = {
        "power-0.5": {"power": 0.5},
        "own-part": {"part": "own"},
        "common-part": {"part": "common"},
        "matched": {"match": True},
        "lambda-1": {"strength": 1.0},
        # Starts near the plain router and reaches the paper's weights while the clusters form. 0.3
        # is about the harmonic mean of the dispersions, where Theorem 1 gives 1/s.
        "lambda-scheduled": {"strength": 10.0, "strength_end": 0.3, "strength_steps": 300},
        "mix-2": {"mix": 2},
        "running": {"statistics": "running"},
    }
    base = PREVIOUS if layers == 2 else CURRENT
    found: Conditions = {
        name: {"router": variant_of(base, **change)} for name, change in changes.items()
    }
    return found | {"centred": {"router": variant_of(CURRENT, center=True)}} | distances(base)


def distances(base: AdaptiveConfig) -> Conditions:
    """Return routers that choose the nearest expert in M, for which Proposition 1 has a proof.

    `nearest` has M = I to six digits: what it shares with `distance` is not due to M.
    """
    near = variant_of(base, distance=True)
    return {
        "distance": {"router": near},
        "nearest": {"router": variant_of(near, power=1e-6)},
        "oracle-distance": {"router": variant_of(PREVIOUS, distance=True), "oracle": "cluster"},
    }


def synthetic_grid(*, seeds: Sequence[int]) -> list[tuple[str, Factors, SyntheticConfig]]:
    """Return (condition, factors of its setting, config), seed by seed."""
    return [
        (condition, factors, replace(config, seed=seed))
        for seed in seeds
        for condition, factors, config in _cells()
    ]


def _cells() -> Iterator[tuple[str, Factors, SyntheticConfig]]:
    for layers in (1, 2):
        plain_and_adaptive = SMOE | adaptive(layers) | METRIC
        everything = plain_and_adaptive | ORACLES | RANDOM | variants(layers)
        yield from _setting({"layers": layers}, everything)
        for name, values in VARIED.items():
            for value in values:
                yield from _setting({"layers": layers, name: value}, plain_and_adaptive)
    yield from _difficulties()


def _difficulties() -> Iterator[tuple[str, Factors, SyntheticConfig]]:
    """Yield settings of two layers in which the scale of the first may not help the second."""
    difficulties: list[Factors] = [
        {"between": "permutation"},  # the second layer sees its features in another order
        {"between": "rotation"},  # clusters also have no features of small spread there
        {"batch": 64},  # 16 tokens per cluster
        {"num_clusters": 16, "dim": 64},  # 16 tokens per cluster, and more clusters
        {"separation": 5.0},  # a plain router finds these clusters easily
        {"norm": True},
        {"top_k": 2},
    ]
    for change in difficulties:
        yield from _setting({"layers": 2} | change, SMOE | adaptive(2) | METRIC)
    parts = {name: variants(2)[name] for name in ("own-part", "common-part")}
    for optimizer, router_lr in (("adam", BASE.router_lr), ("sgd", 1.0)):
        factors = {"layers": 2, "feature_range": 16.0, "router_optimizer": optimizer}
        fields = factors | {"router_lr": router_lr}
        yield from _setting(factors, SMOE | adaptive(2) | parts, fields)


def _setting(
    factors: Factors, conditions: Conditions, fields: Factors | None = None
) -> Iterator[tuple[str, Factors, SyntheticConfig]]:
    """Yield all conditions of a setting; `fields` are its changed fields, if not its factors."""
    of_data = GaussianClusters.__dataclass_fields__
    changes = factors if fields is None else fields
    clusters = replace(
        BASE.clusters, **{name: value for name, value in changes.items() if name in of_data}
    )
    rest = {name: value for name, value in changes.items() if name not in of_data}
    for condition, router in conditions.items():
        yield condition, factors, replace(BASE, clusters=clusters, **rest, **router)
