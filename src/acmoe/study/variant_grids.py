"""Ablations of the paper's router, and remedies of what it may lack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from acmoe.config.language import LanguageConfig
from acmoe.config.routing import (
    AdaptiveConfig,
    MetricConfig,
    RandomConfig,
    RouterConfig,
    ThresholdConfig,
)
from acmoe.routing.placement import adaptive_depths
from acmoe.study.cell import Cell, TextTests
from acmoe.study.materials import Materials, Text
from acmoe.study.size import Size
from acmoe.study.text_grids import PAPER, byte_parts, text_cells, word_model, word_parts

ADAPTIVE = "adaptive"  # the paper's: MAD, every layer that can be, batch statistics

_FIXED = ThresholdConfig(bias=True)
_LEARNED = ThresholdConfig(bias=True, learnable=True)

ROUTERS: dict[str, str | RouterConfig] = {
    "smoe": "smoe",
    ADAPTIVE: PAPER,
    "variance": replace(PAPER, measure="variance"),
    "std": replace(PAPER, measure="std"),
    "gini": replace(PAPER, measure="gini"),
    "iqr": replace(PAPER, measure="iqr"),
    "running": AdaptiveConfig(statistics="running"),
    "prefix": AdaptiveConfig(statistics="prefix"),
    "mix-2": replace(PAPER, mix=2),
    "random": RandomConfig(std=0.5),
    "threshold": _FIXED,
    "threshold-adaptive": replace(PAPER, base=_FIXED),
    "threshold-learned": _LEARNED,
    "threshold-learned-adaptive": replace(PAPER, base=_LEARNED),
}
PLACEMENTS = ("skip-1", "skip-2", "alternating", "back-half")


def ablations_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """One thing changed at a time, on bytes and on words."""
    text, model, tests = byte_parts(materials, size)
    bytes_model = replace(model, norm="pre")
    cells = _ablated("switch-enwik8, pre-norm", bytes_model, text, tests, size, seeds)
    text, tests = word_parts(materials, size, tasks=False)
    words_model = word_model("switch-small", text, 0.1)
    return cells + _ablated("switch-small, dropout 0.1", words_model, text, tests, size, seeds)


def _ablated(
    setting: str,
    model: LanguageConfig,
    text: Text,
    tests: TextTests,
    size: Size,
    seeds: Sequence[int],
) -> list[Cell]:
    common = (text, tests, size, seeds)
    cells = text_cells("ablations", setting, model, ROUTERS, *common, factors={})
    for placement in PLACEMENTS:
        # In a model of few layers a placement may leave none adaptive: that is smoe again.
        if adaptive_depths(placement, model.num_moe_layers):
            placed = replace(model, placement=placement)
            router = {placement: PAPER}
            cells += text_cells("ablations", setting, placed, router, *common, factors={})
    return cells


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of the paper's router, and of the training where the remedy lies there."""

    router: Mapping[str, Any] | None = None  # fields of AdaptiveConfig; None: `other`
    other: str | RouterConfig = "smoe"
    run: tuple[str, ...] = field(default=())  # key=value


_SGD = ("router_optimizer=sgd", "router_lr=0.3")

# The one place to add a remedy. A name that ends in -sgd is compared with smoe-sgd.
REMEDIES: dict[str, Remedy] = {
    "smoe": Remedy(),
    ADAPTIVE: Remedy(router={}),
    "current": Remedy(router={"statistics_of": "current"}),
    "running": Remedy(router={"statistics": "running"}),
    "prefix": Remedy(router={"statistics": "prefix", "statistics_of": "current"}),
    "power-0.25": Remedy(router={"power": 0.25}),
    "power-0.5": Remedy(router={"power": 0.5}),
    "common": Remedy(router={"part": "common"}),
    "own": Remedy(router={"part": "own"}),
    "center": Remedy(router={"statistics_of": "current", "center": True}),
    "match": Remedy(router={"match": True}),
    "own-match": Remedy(router={"part": "own", "match": True}),
    "own-center-match": Remedy(
        router={"statistics_of": "current", "part": "own", "center": True, "match": True}
    ),
    "strength-1": Remedy(router={"strength": 1.0}),
    "strength-10": Remedy(router={"strength": 10.0}),
    "strength-falling": Remedy(
        router={"strength": 100.0, "strength_end": 1.0, "strength_steps": 500}
    ),
    "strength-learned": Remedy(router={"strength": 10.0, "learn_strength": True}),
    "no-gain": Remedy(router={"gain": False}),
    "residual": Remedy(router={"read": "residual"}),
    "gradient": Remedy(router={"detach": False}),
    # Beyond the paper: every expert in its own metric, as a distance.
    "metric": Remedy(other="metric"),
    "metric-4": Remedy(other=MetricConfig(bias=True, strength=4.0)),
    "metric-16": Remedy(other=MetricConfig(bias=True, strength=16.0)),
    # Adam divides out what all clusters share, feature by feature; plain descent does not.
    "smoe-sgd": Remedy(run=_SGD),
    "adaptive-sgd": Remedy(router={}, run=_SGD),
    "common-sgd": Remedy(router={"part": "common"}, run=_SGD),
    "own-sgd": Remedy(router={"part": "own"}, run=_SGD),
}


def remedy_comparisons() -> tuple[tuple[str, str], ...]:
    """Each remedy, and the plain router trained as it is."""
    baseline = {name: "smoe-sgd" if name.endswith("-sgd") else "smoe" for name in REMEDIES}
    return tuple((name, plain) for name, plain in baseline.items() if name != plain)


def remedies_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """What the mathematics offers, on bytes with pre-norm blocks."""
    text, model, tests = byte_parts(materials, size)
    model = replace(model, norm="pre")
    cells = []
    for name, remedy in REMEDIES.items():
        router = remedy.other if remedy.router is None else replace(PAPER, **remedy.router)
        cells += text_cells(
            "remedies",
            "switch-enwik8, pre-norm",
            model,
            {name: router},
            text,
            tests,
            replace(size, overrides=(*remedy.run, *size.overrides)),
            seeds,
            factors={},
        )
    return cells
