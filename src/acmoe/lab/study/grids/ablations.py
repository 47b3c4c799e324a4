"""Ablations: the paper's router with one choice changed at a time, for a GPU and for a CPU."""

from collections.abc import Sequence
from dataclasses import replace

from acmoe.config.routing import AdaptiveConfig, RandomConfig, RouterConfig, ThresholdConfig
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.grids.nano import nano_text_cells
from acmoe.lab.study.grids.text import (
    PAPER,
    TextSetting,
    byte_parts,
    text_cells,
    word_model,
    word_parts,
)
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.size import Size
from acmoe.recipes.nano import nano_run
from acmoe.routing.layer_plan import adaptive_depths

BYTE_SETTING, WORD_SETTING = "switch-enwik8, pre-norm", "switch-small, dropout 0.1"

ADAPTIVE = "adaptive"  # the paper's router: MAD, batch statistics, adaptive wherever possible

_FIXED = ThresholdConfig(bias=True)
_LEARNED = ThresholdConfig(bias=True, learnable=True)

ROUTERS: dict[str, str | RouterConfig] = {
    "smoe": "smoe",
    ADAPTIVE: PAPER,
    "variance": replace(PAPER, measure="variance"),
    "std": replace(PAPER, measure="std"),
    "iqr": replace(PAPER, measure="iqr"),
    "gini": replace(PAPER, measure="gini"),
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


def ablation_comparisons() -> tuple[tuple[str, str], ...]:
    """Compare each choice with the paper's, that with the plain router, thresholds in pairs."""
    changed = [name for name in (*ROUTERS, *PLACEMENTS) if not name.startswith("threshold")]
    return (
        (ADAPTIVE, "smoe"),
        *((name, ADAPTIVE) for name in changed if name not in ("smoe", ADAPTIVE)),
        ("threshold-adaptive", "threshold"),
        ("threshold-learned-adaptive", "threshold-learned"),
    )


def placements(num_layers: int) -> list[str]:
    """Return the placements that give a model of `num_layers` different sets of adaptive layers.

    With few layers some placements have no adaptive layer, which is smoe, and some are equal to
    another one or to `full`.
    """
    seen, found = {(), adaptive_depths("full", num_layers)}, []
    for placement in PLACEMENTS:
        depths = adaptive_depths(placement, num_layers)
        if depths not in seen:
            seen.add(depths)
            found.append(placement)
    return found


def byte_ablations(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells on bytes, for a GPU."""
    text, model, tests = byte_parts(materials, size)
    setting = TextSetting(
        study="ablations",
        name=BYTE_SETTING,
        model=replace(model, norm="pre"),
        text=text,
        tests=tests,
    )
    return _ablation_cells(setting, size, seeds)


def word_ablations(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells on words, for a GPU."""
    text, tests = word_parts(materials, size)
    setting = TextSetting(
        study="ablations",
        name=WORD_SETTING,
        model=word_model("switch-small", text, 0.1),
        text=text,
        tests=tests,
    )
    return _ablation_cells(setting, size, seeds)


def _ablation_cells(setting: TextSetting, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of all routers and placements in one setting."""
    cells = text_cells(setting, ROUTERS, size, seeds)
    for placement in placements(setting.model.num_moe_layers):
        changed = replace(setting, model=replace(setting.model, placement=placement))
        cells += text_cells(changed, {placement: PAPER}, size, seeds)
    return cells


def nano_ablations(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells on the standard library's text, for a CPU."""
    model = nano_run("switch-nano", "smoe").model
    common = (materials, size, seeds)
    cells = nano_text_cells("ablations", ROUTERS, *common)
    for placement in placements(model.num_moe_layers):
        cells += nano_text_cells("ablations", {placement: PAPER}, *common, placement=placement)
    return cells
