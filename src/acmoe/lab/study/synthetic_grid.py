"""The cells of the synthetic study: what is varied, and what is compared at each setting.

Every setting departs from one base in the factors it names. `smoe` is the baseline of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from acmoe.config.routing import AdaptiveConfig, MetricConfig, RandomConfig, SMoEConfig
from acmoe.data.text.synthetic import GaussianClusters
from acmoe.lab.study.synthetic_task import SyntheticConfig

Factors = dict[str, Any]
Conditions = dict[str, dict[str, Any]]  # condition -> fields of its SyntheticConfig

BASE = SyntheticConfig()

# What the theory's gain should depend on, each value with all else as in BASE.
VARIED: dict[str, tuple[float, ...]] = {
    "contrast": (1.0, 2.0, 32.0),
    "dim": (64,),  # 48 features that are loose in every cluster
    "noise": (0.5,),
}

# The paper takes the statistics of the batch in hand.
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
    """The two readings of the paper; with one layer they are the same."""
    both: Conditions = {
        "adaptive-previous": {"router": PREVIOUS},
        "adaptive-current": {"router": CURRENT},
    }
    return both if layers == 2 else {"adaptive-current": both["adaptive-current"]}


def remedies(layers: int) -> Conditions:
    """What might mend an adaptive router, each a change of one thing."""
    changes: dict[str, dict[str, Any]] = {
        "power-0.5": {"power": 0.5},
        "own-part": {"part": "own"},
        "common-part": {"part": "common"},
        "matched": {"match": True},
        "lambda-1": {"strength": 1.0},
        # From next to the plain router to the paper's weights as the clusters form; 0.3 is about
        # the harmonic mean of the dispersions, where Theorem 1 gives 1/s.
        "lambda-scheduled": {"strength": 10.0, "strength_end": 0.3, "strength_steps": 300},
        "mix-2": {"mix": 2},
        "running": {"statistics": "running"},
    }
    form = PREVIOUS if layers == 2 else CURRENT
    found: Conditions = {
        name: {"router": replace(form, **change)} for name, change in changes.items()
    }
    return found | {"centred": {"router": replace(CURRENT, center=True)}}


def synthetic_grid(*, seeds: Sequence[int]) -> list[tuple[str, Factors, SyntheticConfig]]:
    """(condition, factors of its setting, config), seed by seed."""
    return [
        (condition, factors, replace(config, seed=seed))
        for seed in seeds
        for condition, factors, config in _cells()
    ]


def _cells() -> Iterator[tuple[str, Factors, SyntheticConfig]]:
    for layers in (1, 2):
        plain_and_adaptive = SMOE | adaptive(layers) | METRIC
        everything = plain_and_adaptive | ORACLES | RANDOM | remedies(layers)
        yield from _setting({"layers": layers}, everything)
        for name, values in VARIED.items():
            for value in values:
                yield from _setting({"layers": layers, name: value}, plain_and_adaptive)
    yield from _causes()


def _causes() -> Iterator[tuple[str, Factors, SyntheticConfig]]:
    """What might spoil the scale between two layers."""
    causes: list[Factors] = [
        {"between": "permutation"},  # drift: the second layer's features are others
        {"between": "rotation"},  # nor are clusters tight along its features
        {"batch": 64},  # 16 tokens a cluster
        {"num_clusters": 16, "dim": 64},  # 16 tokens a cluster, and more of them
        {"separation": 5.0},  # clusters a plain router finds without trouble
        {"norm": True},
        {"top_k": 2},
    ]
    for cause in causes:
        yield from _setting({"layers": 2} | cause, SMOE | adaptive(2) | METRIC)
    parts = {name: remedies(2)[name] for name in ("own-part", "common-part")}
    for optimizer, router_lr in (("adam", BASE.router_lr), ("sgd", 1.0)):
        factors = {"layers": 2, "feature_range": 16.0, "router_optimizer": optimizer}
        fields = factors | {"router_lr": router_lr}
        yield from _setting(factors, SMOE | adaptive(2) | parts, fields)


def _setting(
    factors: Factors, conditions: Conditions, fields: Factors | None = None
) -> Iterator[tuple[str, Factors, SyntheticConfig]]:
    of_data = GaussianClusters.__dataclass_fields__
    asked = factors if fields is None else fields
    clusters = replace(
        BASE.clusters, **{name: value for name, value in asked.items() if name in of_data}
    )
    rest = {name: value for name, value in asked.items() if name not in of_data}
    for condition, router in conditions.items():
        yield condition, factors, replace(BASE, clusters=clusters, **rest, **router)
