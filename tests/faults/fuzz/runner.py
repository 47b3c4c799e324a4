"""Run fuzz targets in turn for a given time, and collect each fault once."""

import random
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from cpu import settle_cpu
from faults.fuzz.common import Target, try_value

MEMORY = 8 * 2**30  # bytes of a worker
ROUND = 100  # examples of a target, before the next one has its turn


@dataclass
class Report:
    """Examples by target, and one entry for each place at which an unexpected error was raised."""

    examples: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, str]] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Merge the report of another process; faults at the same place count once."""
        self.examples += other.examples
        known = {finding["place"] for finding in self.findings}
        self.findings += [one for one in other.findings if one["place"] not in known]


def work(names: list[str], seconds: float, seed: int) -> Report:
    """Fuzz in this process, every worker in another order.

    The limit on memory turns a size that was believed into a MemoryError, which is a finding.
    """
    settle_cpu()
    warnings.simplefilter("ignore")  # hypothesis warns that a request of 70 kB is long to print
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    from faults.fuzz.targets import TARGETS  # slow, and not needed by the process that waits

    targets = [TARGETS[name] for name in names or TARGETS]
    random.Random(seed).shuffle(targets)
    return fuzz(targets, seconds=seconds, seed=seed)


def fuzz(targets: Sequence[Target], *, seconds: float, seed: int) -> Report:
    """Try random values of all targets in turn until the time is over."""
    report, rng = Report(), random.Random(seed)
    end = time.monotonic() + seconds
    for target in targets:
        for value in target.kept:
            _try_kept(target, value, report)
    while time.monotonic() < end:
        for target in targets:
            share = (end - time.monotonic()) / len(targets)
            _round(target, report, rng.getrandbits(64), min(end, time.monotonic() + share + 1))
    return report


def _try_kept(target: Target, value: Any, report: Report) -> None:
    report.examples[target.name] += 1
    try:
        try_value(target, value)
    except Exception as error:
        _note(report, target, value, error)


def _round(target: Target, report: Report, number: int, end: float) -> None:
    """Try up to ROUND values; where one fails, let hypothesis shrink it, and note the result."""
    known = {finding["place"] for finding in report.findings}
    last: list[Any] = []

    @seed(number)
    @settings(
        max_examples=ROUND,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(target.values)
    def attempt(value: Any) -> None:
        if time.monotonic() > end and not last:
            return
        report.examples[target.name] += 1
        try:
            try_value(target, value)
        except Exception as error:
            if place_of(target, error) in known:
                return
            last[:] = [value, error]
            raise

    try:
        attempt()
    except Exception as error:
        value, cause = last or (None, error)
        _note(report, target, value, cause)


def _note(report: Report, target: Target, value: Any, error: Exception) -> None:
    report.findings.append(
        {
            "target": target.name,
            "place": place_of(target, error),
            "value": repr(value),
            "error": "".join(traceback.format_exception(error)),
        }
    )


def place_of(target: Target, error: BaseException) -> str:
    """Name the target, the kind of error and the innermost line of the library it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/acmoe/" in frame.filename] or frames[-1:]
    where = f"{inside[-1].filename}:{inside[-1].lineno}" if inside else "?"
    return f"{target.name}: {type(error).__name__} at {where}"
