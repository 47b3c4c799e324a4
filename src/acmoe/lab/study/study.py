"""The definition of a study: a question, a grid of cells, and the comparisons that answer it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from acmoe.errors import check
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.size import Size, WatchedSize

# Makes the cells of the given seeds, in all settings and conditions.
Grid = Callable[[Materials, Size, Sequence[int]], list[Cell]]


class Part(NamedTuple):
    """Settings of a study whose cells are made by a grid of their own."""

    settings: tuple[str, ...]  # their names; empty where only the grid knows them
    grid: Grid
    reads_data: bool = True  # False: the data come with Python and the installed packages


def selects(part: str, setting: str, names: Sequence[str]) -> bool:
    """Match a complete name exactly, even if another contains it, and any other text as a part.

    `names` are those of all settings. A name consists of parts with commas between. A text that is
    such a part of some name matches these names alone: "balance 0" does not mean "balance 0.01".
    """
    if part in names:
        return part == setting
    whole = any(part in name.split(", ") for name in names)
    return part in (setting.split(", ") if whole else setting)


def check_names(only: Sequence[str], settings: Sequence[str]) -> None:
    """Raise a UserError for a KEY=VALUE that --only or --settings took as one of its names."""
    for option, names in (("--only", only), ("--settings", settings)):
        for name in names:
            check("=" not in name, f"{option} {name}: KEY=VALUE comes before the options")


def check_settings(settings: Sequence[str], names: Sequence[str]) -> None:
    """Raise a UserError for a part that no name of a setting has."""
    for part in settings:
        check(
            any(part in name for name in names),
            f"--settings {part}: no setting has that in its name; they are: {'; '.join(names)}",
        )


def choose(cells: Sequence[Cell], only: Sequence[str], settings: Sequence[str]) -> list[Cell]:
    """Return the cells of these conditions and settings, all if none are given.

    A UserError names a condition or a part of a setting that no cell has.
    """
    conditions = list(dict.fromkeys(cell.condition for cell in cells))
    for name in only:
        check(
            name in conditions,
            f"--only {name}: the study has no such condition; choose from {', '.join(conditions)}",
        )
    names = list(dict.fromkeys(cell.setting for cell in cells))
    check_settings(settings, names)
    return [
        cell
        for cell in cells
        if (not only or cell.condition in only)
        and (not settings or any(selects(part, cell.setting, names) for part in settings))
    ]


class Metric(NamedTuple):
    """A figure in the record of a cell."""

    key: str
    label: str
    better: Literal["lower", "higher", "neither"] = "neither"
    digits: int = 4
    setting: str = ""  # the only setting that has this metric; empty: all have it

    def is_of(self, setting: str) -> bool:
        """Return True where the setting has this metric."""
        return self.setting in ("", setting)


class PaperFigure(NamedTuple):
    """A figure of the paper, shown beside ours: its data, model size and run length differ."""

    what: str
    plain: str
    adaptive: str
    source: str  # table or section of the paper


@dataclass(frozen=True, kw_only=True)
class Study:
    """A family of comparisons; Holm's correction covers all comparisons in one metric."""

    name: str
    question: str
    grid: Grid | None = None  # makes all cells, unless there are `parts`
    reads_data: bool = True  # False: `grid` needs no folder of data sets
    parts: tuple[Part, ...] = ()  # all settings, where some read other options or data than others
    seeds: int  # the fewest seeds that the study's claims need
    # Pairs that were declared before the runs: a comparison with fewer is interim and has no test.
    # None: no number was declared.
    declared_pairs: int | None = None
    # Settings for which another number was declared.
    declared_in: Mapping[str, int] = field(default_factory=dict)
    # Settings that differ in their learning rate alone, with the rate of each, ascending.
    rates: Mapping[str, float] = field(default_factory=dict)
    first_seed: int = 0
    comparisons: tuple[tuple[str, str], ...]  # (condition, baseline)
    compared: tuple[Metric, ...]  # tested metrics; the first is the primary one
    descriptive: tuple[Metric, ...] = ()  # metrics that are shown but not tested
    robustness: tuple[Metric, ...] = ()  # one table of clean and corrupted texts; not tested
    curve: str = "valid"
    curve_label: str = ""
    difference_curves: bool = False  # True: also plot the paired difference over training
    routing_curves: bool = False  # True: also plot load, instability and separation over training
    paper: tuple[PaperFigure, ...] = ()
    note: str = ""  # a remark for readers of the tables

    @property
    def own_seeds(self) -> tuple[int, ...]:
        """The seeds that run unless others are given."""
        return tuple(range(self.first_seed, self.first_seed + self.seeds))

    @property
    def free_settings(self) -> tuple[str, ...]:
        """The settings that need no data folder although the study reads data."""
        free = [part for part in self.parts if not part.reads_data]
        return tuple(name for part in free for name in part.settings) if self.reads() else ()

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of all settings; empty where only the grid knows them."""
        return tuple(name for part in self.parts for name in part.settings)

    def declared(self, setting: str) -> int | None:
        """Return how many pairs were declared for a setting, or None if no number was declared."""
        return self.declared_in.get(setting, self.declared_pairs)

    def cells(
        self, materials: Materials, size: Size, seeds: Sequence[int], settings: Sequence[str] = ()
    ) -> list[Cell]:
        """Return the cells of all parts, or of those that `settings` selects.

        `settings` are parts of the names of settings. A part that is not selected prepares no data,
        and reads neither sizes nor overrides. A size that no cell reads raises a UserError.
        """
        size = WatchedSize(size)
        grids = [part.grid for part in self._selected(settings)]
        cells = [cell for grid in grids for cell in grid(materials, size, seeds)]
        unread, where = size.unread(), f" with --settings {' '.join(settings)}" if settings else ""
        check(not unread, f"study {self.name} reads no {' '.join(unread)}{where}; leave it out")
        return cells

    def reads(self, settings: Sequence[str] = ()) -> bool:
        """Return True where these settings, or all if none are given, need a data folder."""
        return any(part.reads_data for part in self._selected(settings))

    def _selected(self, settings: Sequence[str]) -> list[Part]:
        if not self.parts:
            assert self.grid is not None, f"the study {self.name} has neither a grid nor parts"
            return [Part((), self.grid, self.reads_data)]
        return [
            part
            for part in self.parts
            if not settings
            or any(
                selects(text, name, self.settings) for text in settings for name in part.settings
            )
        ]

    @property
    def primary(self) -> tuple[Metric, ...]:
        """The first compared metric, once for each unit that it has in different settings."""
        return tuple(metric for metric in self.compared if metric.key == self.compared[0].key)


# Behaviour and cost of the routers, the same in every study of trained models.
ROUTER_METRICS = (
    Metric("load_balance", "load balance (std, points)", digits=2),
    Metric("instability", "instability", digits=3),
    Metric("instability_chance", "by chance", digits=3),
    Metric("scale_rms_log", "rms of log M", digits=3),
    Metric("scale_common", "common to clusters", digits=2),
    Metric("step_ms", "step (ms)", digits=1),
    Metric("peak_memory_gib", "memory (GiB)", digits=2),
)
