"""What a study is: a question, a grid of cells, and the comparisons that answer it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from acmoe.lab.study.cell import Cell
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.size import Size

# The cells of some seeds, all settings and conditions.
Grid = Callable[[Materials, Size, Sequence[int]], list[Cell]]


class Free(NamedTuple):
    """Settings without a data set: what they read comes with Python and the packages."""

    settings: tuple[str, ...]
    grid: Grid


class Metric(NamedTuple):
    """A figure of a cell's record."""

    key: str
    label: str
    better: Literal["lower", "higher", "neither"] = "neither"
    digits: int = 4
    setting: str = ""  # the one it is a figure of; empty: all

    def is_of(self, setting: str) -> bool:
        return self.setting in ("", setting)


class Reported(NamedTuple):
    """A figure of the paper, for the eye: other data, sizes and lengths than ours."""

    what: str
    plain: str
    adaptive: str
    source: str  # where in the paper


@dataclass(frozen=True, kw_only=True)
class Study:
    """A family of comparisons. Holm's correction covers all of them in one metric."""

    name: str
    question: str
    grid: Grid
    reads_data: bool = True  # `grid`; False: no folder of data sets has to be given
    free: Free | None = None  # further settings of a study that reads data
    seeds: int  # fewest for the claims the study is for
    first_seed: int = 0
    comparisons: tuple[tuple[str, str], ...]  # condition, and the baseline it is compared with
    compared: tuple[Metric, ...]  # the first is the primary one
    beside: tuple[Metric, ...] = ()  # shown, not tested
    curve: str = "valid"
    curve_label: str = ""
    reported: tuple[Reported, ...] = ()
    note: str = ""  # what a reader of the tables has to know

    @property
    def own_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.first_seed, self.first_seed + self.seeds))

    @property
    def free_settings(self) -> tuple[str, ...]:
        """Those that need no folder although the study reads data."""
        return () if self.free is None else self.free.settings

    def cells(
        self, materials: Materials, size: Size, seeds: Sequence[int], asked: Sequence[str] = ()
    ) -> list[Cell]:
        """All cells, or the free ones where `asked`, parts of names of settings, means no other."""
        free = [] if self.free is None else self.free.grid(materials, size, seeds)
        return free if self._all_free(asked) else [*self.grid(materials, size, seeds), *free]

    def reads(self, asked: Sequence[str]) -> bool:
        """Whether a folder of data sets is needed for these settings; for all, if none is given."""
        return self.reads_data and not self._all_free(asked)

    def _all_free(self, asked: Sequence[str]) -> bool:
        return bool(asked) and all(
            any(part in name for name in self.free_settings) for part in asked
        )

    @property
    def primary(self) -> tuple[Metric, ...]:
        """The first of the compared metrics; it may have other units in another setting."""
        return tuple(metric for metric in self.compared if metric.key == self.compared[0].key)


# How the routers behave and what they cost; the same in every study of trained models.
BESIDE = (
    Metric("load_balance", "load balance (std, points)", digits=2),
    Metric("instability", "instability", digits=3),
    Metric("instability_chance", "by chance", digits=3),
    Metric("scale_rms_log", "rms of log M", digits=3),
    Metric("scale_common", "common to clusters", digits=2),
    Metric("step_ms", "step (ms)", digits=1),
    Metric("peak_memory_gib", "memory (GiB)", digits=2),
)
