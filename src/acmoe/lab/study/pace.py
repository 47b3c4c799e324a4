"""The time that cells take, and whether another one can end before the study's time limit."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from acmoe.lab.study.cell import Cell
from acmoe.lab.study.results.records import DONE, Record


@dataclass(kw_only=True)
class Pace:
    """The time that cells took so far, by setting."""

    ends: float | None = None  # the clock (`time.monotonic`) at which the time is over; None: never
    longest: float = 0.0  # seconds that the slowest cell so far took
    paces: dict[str, float] = field(default_factory=dict)  # seconds per update, by setting

    def expected(self, cell: Cell) -> float:
        """Return the seconds a cell will take, by its setting's pace or by the longest so far."""
        pace = self.paces.get(cell.setting)
        return self.longest if pace is None else pace * _updates(cell)

    def fits(self, cell: Cell) -> bool:
        """Return True where a cell that starts now is expected to be done in time."""
        return self.ends is None or time.monotonic() + self.expected(cell) < self.ends

    def took(self, cell: Cell, seconds: float) -> None:
        """Note the time that a cell took."""
        self.longest = max(self.longest, seconds)
        pace = seconds / _updates(cell)
        self.paces[cell.setting] = max(pace, self.paces.get(cell.setting, 0.0))


def end_of(minutes: float | None) -> float | None:
    """Return the clock at which so many minutes from now are over; None without a limit."""
    return None if minutes is None else time.monotonic() + 60 * minutes


def known_paces(records: Sequence[Record], origin: Record) -> dict[str, float]:
    """Return the most seconds per update by setting, of cells done in the same environment.

    Commits may differ; devices, and the number of cells that share one, may not.
    """
    place = _place(origin)
    found: dict[str, float] = {}
    for record in records:
        steps = (record.get("config") or {}).get("steps")
        if record["status"] == DONE and steps and place == _place(record) != (None, None):
            pace = record["metrics"].get("seconds", 0.0) / steps
            found[record["setting"]] = max(pace, found.get(record["setting"], 0.0))
    return found


def _place(record: Record) -> tuple[Any, Any]:
    environment = record.get("environment") or {}
    return environment.get("device"), environment.get("jobs")


def _updates(cell: Cell) -> int:
    """Return the number of updates, the measure of a cell's length within its setting."""
    return max(1, int(getattr(cell.config, "steps", 1)))
