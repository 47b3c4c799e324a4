"""Run the cells of a study in processes of this machine, or on a Ray cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from acmoe.lab.study.cell import Cell
from acmoe.lab.study.cell_queue import OnEvent, Tally
from acmoe.lab.study.environment import study_environment
from acmoe.lab.study.progress import StudyProgress
from acmoe.lab.study.results.records import DONE, FAILED, Record, Results, open_results


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """The options of a command that say how cells are run, not which."""

    study: str
    records: Path
    options: str  # the size of the cells, as on the command line
    ray: bool
    address: str | None
    jobs: int
    scratch: Path | None
    minutes: float | None
    retry: bool
    device: str

    def run(self, cells: Sequence[Cell]) -> int:
        """Run the cells that have no record, print the result, and return the exit status."""
        skipped = {DONE} if self.retry else {DONE, FAILED}
        if self.scratch is not None:
            self.scratch.mkdir(parents=True, exist_ok=True)
        with open_results(self.records) as results:
            left = [cell for cell in cells if results.status(cell.digest) not in skipped]
            run = self._run_on_ray if self.ray else self._run_in_pool
            try:
                with StudyProgress(self.study, len(cells), len(cells) - len(left)) as progress:
                    tally = run(left, results, self._origin(), progress)
            except KeyboardInterrupt:
                done = sum(results.status(cell.digest) == DONE for cell in cells)
                raise KeyboardInterrupt(
                    f"{done} of {len(cells)} cells are done, in {self.records}; give the same "
                    "command again to continue"
                ) from None
        print(
            f"{self.study}: {len(cells) - len(left)} cells had a record, {tally.done} done, "
            f"{tally.failed} failed, {tally.left} not started for lack of time ({self.records})"
        )
        return 1 if tally.failed else 0

    def _origin(self) -> Record:
        # A Ray worker adds the environment of its node; this process may have no GPU.
        device = "auto" if self.ray else self.device
        return {
            "environment": study_environment(device, jobs=self.jobs),
            "options": self.options,
        }

    def _run_in_pool(
        self, cells: Sequence[Cell], results: Results, origin: Record, on_event: OnEvent
    ) -> Tally:
        from acmoe.lab.study.pool import run_cells

        return run_cells(
            cells,
            results,
            jobs=self.jobs,
            scratch=self.scratch,
            minutes=self.minutes,
            origin=origin,
            on_event=on_event,
        )

    def _run_on_ray(
        self, cells: Sequence[Cell], results: Results, origin: Record, on_event: OnEvent
    ) -> Tally:
        from acmoe.lab.study.cluster import run_on_cluster
        from acmoe.lab.study.ray_cluster import ray_cluster
        from acmoe.lab.study.ray_worker import Job

        job = Job(
            jobs=self.jobs,
            device=self.device,
            scratch=None if self.scratch is None else self.scratch.resolve(),
            commit=origin["environment"]["commit"],
        )
        with ray_cluster(self.address, job) as cluster:
            return run_on_cluster(
                cells, results, cluster, minutes=self.minutes, origin=origin, on_event=on_event
            )
