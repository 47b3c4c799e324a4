"""Make the cells of one setting: every condition with every seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from acmoe.config.images.train import VisionRunConfig
from acmoe.config.routing import AdaptiveConfig, RouterConfig, SMoEConfig
from acmoe.config.text.train import RunConfig
from acmoe.lab.study.cell import Cell, ImageTests, TextTests

Conditions = Mapping[str, str | RouterConfig]  # routers by the condition's name
MakeRun = Callable[[str | RouterConfig, int], RunConfig | VisionRunConfig]  # router, seed -> run


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The part of a grid that all compared conditions share."""

    study: str
    name: str
    unit: str  # the unit in which a batch is counted, such as tokens
    data: str  # fingerprint of the training data
    tests: TextTests | ImageTests
    factors: Mapping[str, str | int | float] = field(default_factory=dict)


def as_recorded(preset: str) -> AdaptiveConfig:
    """Return a published preset as it was when the records were taken.

    Means were over all clusters, chosen or not, and of the clamped weights, and the length of the
    embeddings was free. The presets follow the published code in these, too, since then.
    """
    config = AdaptiveConfig.preset(preset)
    base = config.base
    if isinstance(base, SMoEConfig):
        base = replace(base, embedding_length=None)
    return replace(config, base=base, mean_over="all", mean_before_clamp=False)


def grid_cells(
    setting: Setting, conditions: Conditions, seeds: Sequence[int], make_run: MakeRun
) -> list[Cell]:
    """Return a cell for each seed and condition, ordered by seed."""
    cells = []
    for seed, (condition, router) in product(seeds, conditions.items()):
        config = make_run(router, seed)
        rows = config.tokens_per_step if isinstance(config, RunConfig) else config.batch
        cells.append(
            Cell(
                study=setting.study,
                setting=setting.name,
                condition=condition,
                factors=setting.factors,
                seed=seed,
                size=f"{config.steps:,} steps of {rows:,} {setting.unit}",
                data=setting.data,
                config=config,
                tests=setting.tests,
            )
        )
    return cells
