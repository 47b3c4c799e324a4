"""The cells that a command `acmoe study NAME` selects."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from acmoe.data.progress import progress_bars
from acmoe.errors import check
from acmoe.lab.study.cell import Cell, seeds_major
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.planned import PlannedMaterials, UnreadMaterials
from acmoe.lab.study.size import Size
from acmoe.lab.study.study import Study, check_names, check_settings, choose


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A study and the options of the command that say which of its cells are meant."""

    study: Study
    data: Path | None
    work: Path
    size: Size
    seeds: tuple[int, ...]
    only: tuple[str, ...]
    settings: tuple[str, ...]

    def __post_init__(self) -> None:
        check_names(self.only, self.settings)
        if self.study.settings:  # before a mistyped one is taken for one that reads data
            check_settings(self.settings, self.study.settings)
        check(
            self.data is None or self.study.reads(self.settings),
            f"--data {self.data} is not read: {self._meant} needs no data folder; leave it out",
        )
        text = " ".join(map(str, self.seeds))
        twice = len(set(self.seeds)) < len(self.seeds)
        check(not twice, f"--seeds {text} names a seed twice; leave one out")

    def planned(self) -> list[Cell]:
        """Return the cells with their data sets checked, but not prepared."""
        free = [f'--settings "{setting}" reads none' for setting in self.study.free_settings]
        check(
            self.data is not None or not self.study.reads(self.settings),
            "; ".join(
                [
                    f"the study {self.study.name!r} reads data sets; give their folder with --data "
                    "(docs/howto/study-data.md says what it holds)",
                    *free,
                ]
            ),
        )
        return self._cells(PlannedMaterials(data=self._folder, work=self.work))

    def prepared(self) -> list[Cell]:
        """Return the cells; prepare their data sets, and show the progress."""
        with progress_bars(Console(stderr=True)) as progress:
            return self._cells(Materials(data=self._folder, work=self.work, progress=progress))

    def unread(self) -> list[Cell]:
        """Return the cells without looking at their data sets."""
        return self._cells(UnreadMaterials(data=self._folder, work=self.work))

    def _cells(self, materials: Materials) -> list[Cell]:
        cells = self.study.cells(materials, self.size, self.seeds, self.settings)
        return seeds_major(choose(cells, self.only, self.settings))

    @property
    def _folder(self) -> Path:
        return self.data or Path()

    @property
    def _meant(self) -> str:
        """The study, or the settings of it that need no data."""
        if not self.study.reads():
            return f"the study {self.study.name!r}"
        return "--settings " + " ".join(self.settings)
