"""Remedies of what the paper's router may lack, on a card and on two CPU cores, and the chosen ones
again on fresh seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from acmoe.config.routing import MetricConfig, RouterConfig
from acmoe.errors import check
from acmoe.lab.study.ablation_grids import ADAPTIVE
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.nano_grid import TEXT_STEPS, nano_text_cells
from acmoe.lab.study.size import Size
from acmoe.lab.study.text_grids import BYTE_STEPS, PAPER, byte_parts, text_cells


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of the paper's router, and of the training where the remedy lies there."""

    router: Mapping[str, Any] | None = None  # fields of AdaptiveConfig; None: `other`
    other: str | RouterConfig = "smoe"
    run: tuple[str, ...] = field(default=())  # key=value

    def of(self, steps: int) -> str | RouterConfig:
        """The router of a run of so many steps; a strength that falls reaches its end with it."""
        if self.router is None:
            return self.other
        falls = {"strength_steps": steps} if "strength_end" in self.router else {}
        return replace(PAPER, **{**self.router, **falls})


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
    "strength-falling": Remedy(router={"strength": 100.0, "strength_end": 1.0}),
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
    return _remedied("remedies", tuple(REMEDIES), materials, size, seeds)


def nano_remedies(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """All of them on the standard library's text, for a CPU."""
    cells = []
    for conditions, sized in _by_run(tuple(REMEDIES), size, size.steps or TEXT_STEPS):
        cells += nano_text_cells("remedies", conditions, materials, sized, seeds)
    return cells


def _by_run(
    names: Sequence[str], size: Size, steps: int
) -> Iterator[tuple[dict[str, str | RouterConfig], Size]]:
    """The routers that are trained alike, and how."""
    chosen = {name: REMEDIES[name] for name in names}
    for run in dict.fromkeys(remedy.run for remedy in chosen.values()):
        routers = {name: one.of(steps) for name, one in chosen.items() if one.run == run}
        yield routers, replace(size, overrides=(*run, *size.overrides))


# Closest to the plain router, or below it, in test bits per byte on the first seeds of the study of
# remedies; the paper's form stands beside them.
CHOSEN = ("power-0.5", "strength-10", "residual")
FRESH_SEED = 10  # the first that no choice was made on


def confirm_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """The chosen remedies once more; seeds of the choice would confirm it by themselves."""
    used = [seed for seed in seeds if seed < FRESH_SEED]
    check(
        not used,
        f"--seeds {' '.join(map(str, used))}: remedies were chosen on seeds below {FRESH_SEED}, so "
        "these confirm nothing; give others, or none",
    )
    return _remedied("confirm", ("smoe", ADAPTIVE, *CHOSEN), materials, size, seeds)


def confirm_comparisons() -> tuple[tuple[str, str], ...]:
    """Against the plain router, and each remedy against the paper's form that it changes."""
    return (
        *((name, "smoe") for name in (ADAPTIVE, *CHOSEN)),
        *((name, ADAPTIVE) for name in CHOSEN),
    )


def _remedied(
    study: str, names: Sequence[str], materials: Materials, size: Size, seeds: Sequence[int]
) -> list[Cell]:
    text, model, tests = byte_parts(materials, size)
    model = replace(model, norm="pre")
    cells = []
    for conditions, sized in _by_run(names, size, size.steps or BYTE_STEPS):
        cells += text_cells(
            study,
            "switch-enwik8, pre-norm",
            model,
            conditions,
            text,
            tests,
            sized,
            seeds,
            factors={},
        )
    return cells
