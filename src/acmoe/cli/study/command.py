"""`acmoe study NAME`: run a declared grid of training runs, or summarise its results."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from acmoe.cli.arguments.shared import Device
from acmoe.cli.arguments.unread import check_read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from acmoe.cli.study.cells import Selection
    from acmoe.cli.study.files import StudyFiles
    from acmoe.lab.study.cell import Cell
    from acmoe.lab.study.size import Size

# Options that say how cells are run, not which.
RUN_ONLY = ("scratch", "engine", "address", "jobs", "minutes", "retry", "device")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Run a study: a grid of training runs, called cells. A repeated command continues it."""

    study: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[NAME]")] = ""
    """Name of the study; `acmoe study --list` shows them all."""
    overrides: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[KEY=VALUE ...]")
    ] = ()
    """Settings to change in every cell, such as compile=true or model.dim=64."""
    data: Path | None = None
    """Folder that holds the data sets (enwiki15-bytes, imagenette, ...); studies on synthetic data
    need none."""
    out: Path | None = None
    """File for the results, one JSON line per cell; runs/study/NAME.jsonl if not given."""
    published: bool = False
    """Use the published results of the repository, in a clone of it: studies/records/NAME.jsonl,
    the page studies/NAME.md and the folder studies/figures."""
    work: Path = Path("runs/study")
    """Folder for prepared data, which all cells share."""
    scratch: Path | None = None
    """Folder for the cells' temporary files and, in long studies, checkpoints: a killed cell
    continues from there. The system's temporary folder if not given."""
    seeds: tuple[int, ...] = ()
    """Seeds to run; every comparison is paired by seed. If none is given: the study's own."""
    only: tuple[str, ...] = ()
    """Conditions to run; all if not given."""
    settings: tuple[str, ...] = ()
    """Settings to run, by their names or parts of them; all if not given."""
    engine: Literal["pool", "ray"] = "pool"
    """Run cells in processes on this machine (pool), or on nodes of a Ray cluster (ray)."""
    address: str | None = None
    """Address of the Ray cluster, such as auto or HOST:6379. RAY_ADDRESS if not given; if that is
    not set either, Ray starts on this machine."""
    jobs: int = 1
    """Number of cells that run at once on the device. With --engine ray: on each GPU of the
    cluster, or on each node if --device is cpu."""
    minutes: float | None = None
    """Time limit in minutes. No cell starts that would exceed it at the speed of the cells that are
    done; no limit if not given."""
    retry: bool = False
    """Run failed cells again."""
    steps: int | None = None
    """Optimizer updates per cell; the study's own number if not given."""
    batch: int | None = None
    """Streams of text, or images, per update; the study's own number if not given."""
    tokens: int | None = None
    """Tokens of each text that is scored at the end; the study's own number if not given."""
    megabytes: float | None = None
    """Length of the byte corpus in megabytes; the study's own if not given."""
    parts: int | None = None
    """Number of files in the training text of the word corpus; the study's own if not given."""
    vocabulary: int | None = None
    """Number of words in the vocabulary; the study's own if not given."""
    images: int | None = None
    """Number of images attacked by FGSM and PGD; the study's own if not given."""
    spsa_images: int | None = None
    """Number of images attacked by SPSA; the study's own if not given."""
    brief: bool = False
    """Leave out finetuning and attacks."""
    device: Device = "auto"
    list: bool = False
    """List the studies, or the cells of one study and how each ended in --out, and stop. Records of
    any data count, unless --data is given: then the data are prepared, and theirs alone count."""
    summarise: bool = False
    """Write the study's tables into the page, draw its figures, and stop."""
    evidence: Path | None = None
    """Write the table of the paper's claims, each beside the results of all studies, into this page
    and stop. Give no NAME with it."""
    page: Path | None = None
    """The page to write the tables into, between the study's markers; runs/study/NAME.md if not
    given. A page that does not exist is begun."""
    pictures: Path | None = None
    """Folder for the figures; runs/study/figures if not given, studies/figures with --evidence."""

    def run(self) -> int:
        from acmoe.errors import check
        from acmoe.lab.study.registry import study_of

        if self.evidence is not None:
            check(not self.study, f"--evidence reads all studies; leave {self.study!r} out")
            check_read(self, ("evidence", "pictures"), "with --evidence")
            return self._evidence(self.evidence)
        if not self.study:
            check(self.list, "no study given; `acmoe study --list` shows them all")
            check_read(self, ("list",), "on the list of studies")
            return _list_studies()
        study_of(self.study)  # raises on an unknown name before any file is read
        drawn = ("page", "pictures")
        if self.summarise:  # every record of the file is summarised
            read = ("study", "summarise", "out", "published", *drawn)
            check_read(self, read, "with --summarise")
            return self._summarise()
        run = [one.name for one in fields(self) if one.name not in drawn]
        check_read(self, run, "without --summarise")
        if self.list:
            self._check_list(run)
            return self._list()
        self._check_run()
        if self.engine == "ray":
            from acmoe.lab.study.ray_cluster import ray_library

            ray_library()  # raises where it is missing, before any data is prepared
        return self._run(self._cells())

    def _check_list(self, read: "Sequence[str]") -> None:
        """Raise for an option that only a run reads."""
        read = [name for name in read if name not in RUN_ONLY]
        check_read(self, read, "with --list")
        if self.data is None:
            read.remove("work")
            check_read(self, read, "with --list, unless --data is given too")

    def _check_run(self) -> None:
        """Raise for what cannot be run, before any data is prepared."""
        from acmoe.errors import check
        from acmoe.runtime import pick_device
        from acmoe.storage.writable import check_can_append, check_can_fill

        check(self.jobs >= 1, f"--jobs {self.jobs}; it must be at least 1")
        limit = self.minutes
        check(limit is None or limit > 0, f"--minutes {limit}; it must be positive")
        check(
            self.address is None or self.engine == "ray",
            f"--address {self.address} is of a Ray cluster; give --engine ray too",
        )
        check_can_append(self._files.records)
        if self.scratch is not None:
            check_can_fill(self.scratch)
        if self.engine == "pool":  # a node of Ray looks for the device itself
            pick_device(self.device)

    @property
    def _files(self) -> "StudyFiles":
        """The files of the study: those that are given, else the user's own or the published."""
        from acmoe.cli.study.files import StudyFiles, own_files, published_files
        from acmoe.errors import check

        check(
            self.out is None or not self.published,
            f"--out {self.out} and --published both name the results; leave one out",
        )
        found = published_files(self.study) if self.published else own_files(self.study)
        return StudyFiles(
            self.out or found.records, self.page or found.page, self.pictures or found.pictures
        )

    def _size(self) -> "Size":
        from acmoe.lab.study.size import Size

        names = ("steps", "batch", "tokens", "megabytes", "parts", "vocabulary", "images")
        given = {name: getattr(self, name) for name in (*names, "spsa_images", "brief", "device")}
        return Size(overrides=self.overrides, **given)

    def _selection(self) -> "Selection":
        from acmoe.cli.study.cells import Selection
        from acmoe.lab.study.registry import study_of

        study = study_of(self.study)
        return Selection(
            study=study,
            data=self.data,
            work=self.work.resolve(),
            size=self._size(),
            seeds=self.seeds or study.own_seeds,
            only=self.only,
            settings=self.settings,
        )

    def _cells(self) -> "Sequence[Cell]":
        from acmoe.lab.study.ray_cluster import check_scratch

        selection = self._selection()
        planned = selection.planned()  # raises before data are prepared
        if self.engine == "ray":
            check_scratch(planned, self.scratch)
        return selection.prepared()

    def _list(self) -> int:
        """Print the cells, each with how it ended in the results; "left" has not run."""
        from acmoe.lab.study.listing import LEFT, ended
        from acmoe.lab.study.planned import UNREAD
        from acmoe.lab.study.results.records import DONE, FAILED, read_results

        cells = self._selection().unread() if self.data is None else self._cells()
        path = self._files.records
        records = read_results(path) if path.is_file() else []
        found = ended(cells, records)
        for cell, digest, end in found:
            print(f"{digest or '-':16}  {end:6}  {cell.name}  ({cell.size})")
        ends = [one.end for one in found]
        counts = ", ".join(f"{ends.count(end)} {end}" for end in (DONE, FAILED, LEFT))
        unread = "; data not compared" if any(cell.data == UNREAD for cell in cells) else ""
        noun = "cell" if len(cells) == 1 else "cells"
        print(f"{len(cells)} {noun}: {counts} ({path}{unread})")
        return 0

    def _run(self, cells: "Sequence[Cell]") -> int:
        from acmoe.cli.study.run import StudyRun

        run = StudyRun(
            study=self.study,
            records=self._files.records,
            options=self._size().text,
            ray=self.engine == "ray",
            address=self.address,
            jobs=self.jobs,
            scratch=self.scratch,
            minutes=self.minutes,
            retry=self.retry,
            device=self.device,
        )
        return run.run(cells)

    def _evidence(self, page: Path) -> int:
        from acmoe.cli.study.files import PUBLISHED, PUBLISHED_RECORDS
        from acmoe.lab.study.evidence.page import write_evidence

        pictures = self.pictures or PUBLISHED / "figures"
        _check_can_draw(page, pictures)
        for path in write_evidence(page, PUBLISHED_RECORDS, pictures):
            print(path)
        return 0

    def _summarise(self) -> int:
        from acmoe.lab.study.registry import study_of
        from acmoe.lab.study.results.report import report

        files = self._files
        _check_can_draw(files.page, files.pictures)
        for path in report(study_of(self.study), files.records, files.page, files.pictures):
            print(path)
        return 0


def _check_can_draw(page: Path, pictures: Path) -> None:
    """Raise before the work begins, if the page or its figures could not be written."""
    from acmoe.storage.writable import check_can_fill, check_can_write

    check_can_write(page)
    check_can_fill(pictures)


def _list_studies() -> int:
    from acmoe.lab.study.registry import STUDIES

    table = Table("study", "seeds", "question")
    for name, study in STUDIES.items():
        table.add_row(name, str(study.seeds), study.question)
    Console().print(table)
    return 0
