"""Ablations: the paper's router with one choice changed at a time, from cards to two CPU cores."""

from collections.abc import Sequence
from dataclasses import replace

from acmoe.config.routing import AdaptiveConfig, RandomConfig, RouterConfig, ThresholdConfig
from acmoe.config.text.language import LanguageConfig
from acmoe.lab.study.cell import Cell, TextTests
from acmoe.lab.study.materials import Materials, Text
from acmoe.lab.study.nano_grid import nano_text_cells
from acmoe.lab.study.size import Size
from acmoe.lab.study.text_grids import PAPER, byte_parts, text_cells, word_model, word_parts
from acmoe.recipes.nano import nano_run
from acmoe.routing.placement import adaptive_depths

ADAPTIVE = "adaptive"  # the paper's: MAD, every layer that can be, batch statistics

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
    """Each choice against the paper's, and that against the plain router; thresholds in pairs."""
    changed = [name for name in (*ROUTERS, *PLACEMENTS) if not name.startswith("threshold")]
    return (
        (ADAPTIVE, "smoe"),
        *((name, ADAPTIVE) for name in changed if name not in ("smoe", ADAPTIVE)),
        ("threshold-adaptive", "threshold"),
        ("threshold-learned-adaptive", "threshold-learned"),
    )


def placements(num_layers: int) -> list[str]:
    """Those that leave adaptive layers, and others than `full` or one before leaves.

    In a model of few layers some leave none, which is smoe again, and some agree.
    """
    seen, found = {(), adaptive_depths("full", num_layers)}, []
    for placement in PLACEMENTS:
        depths = adaptive_depths(placement, num_layers)
        if depths not in seen:
            seen.add(depths)
            found.append(placement)
    return found


def ablations_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """On bytes and on words, for a card."""
    text, model, tests = byte_parts(materials, size)
    bytes_model = replace(model, norm="pre")
    cells = _ablated("switch-enwik8, pre-norm", bytes_model, text, tests, size, seeds)
    text, tests = word_parts(materials, size)
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
    for placement in placements(model.num_moe_layers):
        placed = replace(model, placement=placement)
        cells += text_cells("ablations", setting, placed, {placement: PAPER}, *common, factors={})
    return cells


def nano_ablations(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """On the standard library's text, for a CPU."""
    model = nano_run("switch-nano", "smoe").model
    common = (materials, size, seeds)
    cells = nano_text_cells("ablations", ROUTERS, *common)
    for placement in placements(model.num_moe_layers):
        cells += nano_text_cells("ablations", {placement: PAPER}, *common, placement=placement)
    return cells
