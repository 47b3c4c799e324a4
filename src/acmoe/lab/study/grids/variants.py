"""Variants of the paper's router beyond the paper, for a GPU and for two CPU cores.

The study `remedies` tries all of them on few seeds; `confirm` repeats the chosen ones on fresh
seeds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from acmoe.config.routing import MetricConfig, RouterConfig
from acmoe.errors import check
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.grids.ablations import ADAPTIVE, BYTE_SETTING
from acmoe.lab.study.grids.nano import TEXT_STEPS, nano_text_cells
from acmoe.lab.study.grids.text import BYTE_STEPS, PAPER, TextSetting, byte_parts, text_cells
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.size import Size
from acmoe.lab.variants import variant_of


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A change of the paper's router, of the training, or another router in its place."""

    router: Mapping[str, Any] | None = None  # changed fields of VariantConfig; None: use `other`
    other: str | RouterConfig = "smoe"
    run: tuple[str, ...] = field(default=())  # key=value overrides of the run's config

    def router_for(self, steps: int) -> str | RouterConfig:
        """Return the router for a run of `steps`; a falling strength ends with the run."""
        if self.router is None:
            return self.other
        schedule = {"strength_steps": steps} if "strength_end" in self.router else {}
        return variant_of(PAPER, **{**self.router, **schedule})


_SGD = ("router_optimizer=sgd", "router_lr=0.3")

# Add a variant here and nowhere else. A name that ends in -sgd is compared with smoe-sgd.
VARIANTS: dict[str, Variant] = {
    "smoe": Variant(),
    ADAPTIVE: Variant(router={}),
    "current": Variant(router={"statistics_of": "current"}),
    "running": Variant(router={"statistics": "running"}),
    "prefix": Variant(router={"statistics": "prefix", "statistics_of": "current"}),
    "power-0.25": Variant(router={"power": 0.25}),
    "power-0.5": Variant(router={"power": 0.5}),
    "common": Variant(router={"part": "common"}),
    "own": Variant(router={"part": "own"}),
    "center": Variant(router={"statistics_of": "current", "center": True}),
    "match": Variant(router={"match": True}),
    "own-match": Variant(router={"part": "own", "match": True}),
    "own-center-match": Variant(
        router={"statistics_of": "current", "part": "own", "center": True, "match": True}
    ),
    "strength-1": Variant(router={"strength": 1.0}),
    "strength-10": Variant(router={"strength": 10.0}),
    "strength-falling": Variant(router={"strength": 100.0, "strength_end": 1.0}),
    "strength-learned": Variant(router={"strength": 10.0, "learn_strength": True}),
    "no-gain": Variant(router={"gain": False}),
    "residual": Variant(router={"read": "residual"}),
    "gradient": Variant(router={"detach": False}),
    # Not in the paper: routing by distance, with a separate metric for every expert.
    "metric": Variant(other="metric"),
    "metric-4": Variant(other=MetricConfig(bias=True, strength=4.0)),
    "metric-16": Variant(other=MetricConfig(bias=True, strength=16.0)),
    # Adam divides each feature's gradient by its size, which removes the part of the scale that all
    # clusters share. Plain SGD does not.
    "smoe-sgd": Variant(run=_SGD),
    "adaptive-sgd": Variant(router={}, run=_SGD),
    "common-sgd": Variant(router={"part": "common"}, run=_SGD),
    "own-sgd": Variant(router={"part": "own"}, run=_SGD),
}


def variant_comparisons() -> tuple[tuple[str, str], ...]:
    """Compare each variant with the plain router that is trained in the same way."""
    baseline = {name: "smoe-sgd" if name.endswith("-sgd") else "smoe" for name in VARIANTS}
    return tuple((name, plain) for name, plain in baseline.items() if name != plain)


def variants_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of all variants on bytes, with pre-norm blocks."""
    return _byte_cells("remedies", tuple(VARIANTS), materials, size, seeds)


def nano_variants(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of all variants on the standard library's text, for a CPU."""
    cells = []
    for conditions, sized in _by_training(tuple(VARIANTS), size, size.steps or TEXT_STEPS):
        cells += nano_text_cells("remedies", conditions, materials, sized, seeds)
    return cells


def _by_training(
    names: Sequence[str], size: Size, steps: int
) -> Iterator[tuple[dict[str, str | RouterConfig], Size]]:
    """Yield the routers that are trained in the same way, with a size that says how."""
    chosen = {name: VARIANTS[name] for name in names}
    for run in dict.fromkeys(variant.run for variant in chosen.values()):
        routers = {name: one.router_for(steps) for name, one in chosen.items() if one.run == run}
        yield routers, size.adding(*run)


# The variants whose test bits per byte were closest to the plain router's, or below, on the first
# seeds of the study `remedies`. The paper's form is compared beside them.
CHOSEN = ("power-0.5", "strength-10", "residual")
FRESH_SEED = 10  # the first seed that had no part in the choice


def confirm_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of the chosen variants on seeds that had no part in the choice."""
    used = [seed for seed in seeds if seed < FRESH_SEED]
    check(
        not used,
        f"--seeds {' '.join(map(str, used))}: variants were chosen on seeds below {FRESH_SEED}, so "
        "these confirm nothing; give others, or none",
    )
    return _byte_cells("confirm", ("smoe", ADAPTIVE, *CHOSEN), materials, size, seeds)


def confirm_comparisons() -> tuple[tuple[str, str], ...]:
    """Compare with the plain router, and each variant also with the paper's form it changes."""
    return (
        *((name, "smoe") for name in (ADAPTIVE, *CHOSEN)),
        *((name, ADAPTIVE) for name in CHOSEN),
    )


def _byte_cells(
    study: str, names: Sequence[str], materials: Materials, size: Size, seeds: Sequence[int]
) -> list[Cell]:
    text, model, tests = byte_parts(materials, size)
    setting = TextSetting(
        study=study,
        name=BYTE_SETTING,
        model=replace(model, norm="pre"),
        text=text,
        tests=tests,
    )
    cells = []
    for conditions, sized in _by_training(names, size, size.steps or BYTE_STEPS):
        cells += text_cells(setting, conditions, sized, seeds)
    return cells
