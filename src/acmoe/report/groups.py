"""Group the runs of a page: several seeds of one configuration are one condition.

Runs of a group differ in router, seed, data folder and device only; runs of a condition have the
same router as well. Only conditions of one group are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from acmoe.evaluate.run import last_state
from acmoe.evaluate.seeds import Spread
from acmoe.evaluate.statistics import NONE
from acmoe.report.runs import RunFacts

NOT_COMPARED = ("seed", "data.folder", "device")  # settings in which seeds of a condition differ
ROUTER = "model.router"
NAMED = 3  # the most settings in the name of a condition


class ScoreKind(NamedTuple):
    """The properties that two test scores must share to be compared."""

    label: str
    lower: bool  # less is better
    protocol: str
    statistics: str
    at_best: bool  # True: of the checkpoint that was best in validation

    def comparable(self, other: "ScoreKind") -> bool:
        """Return whether scores of two conditions were measured alike.

        A model without adaptive routers has no statistics mode, so any mode of the other will do.
        """
        modes = {self.statistics, other.statistics}
        alike = self._replace(statistics="") == other._replace(statistics="")
        return alike and (len(modes) == 1 or NONE in modes)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Runs of one configuration, which differ in their seeds."""

    group: int
    name: str
    runs: tuple[RunFacts, ...]

    def best(self) -> dict[int, float]:
        """Map each seed to the best validation."""
        return self._by_seed(lambda run: found[1] if (found := run.best()) else None)

    def last(self) -> dict[int, float]:
        """Map each seed to the last validation."""
        return self._by_seed(lambda run: found[max(found)] if (found := run.scores()) else None)

    def tested(self, kind: ScoreKind) -> dict[int, float]:
        """Map each seed to its test score of that kind."""
        return self._by_seed(lambda run: _test_scores(run).get(kind))

    def _by_seed(self, figure: Callable[[RunFacts], float | None]) -> dict[int, float]:
        """Map each seed to a figure of its first finished run that has it."""
        found: dict[int, float] = {}
        for run in self.runs:
            value = figure(run)
            if run.state == "finished" and run.seed is not None and value is not None:
                found.setdefault(run.seed, value)
        return found

    def to_json(self, runs: Sequence[RunFacts]) -> dict[str, Any]:
        """Return mean and spread over seeds of validation and test scores, for the page."""
        kinds = score_kinds(self.runs)
        kind = max(kinds, key=lambda kind: len(self.tested(kind)), default=None)
        tested = None if kind is None else _spread(self.tested(kind))
        finished = [run.seed for run in self.runs if run.state == "finished"]
        return {
            "name": self.name,
            "runs": [n for n, run in enumerate(runs) if any(run is own for own in self.runs)],
            "seeds": sorted(self.best()),
            "unfinished": len(self.runs) - len(finished),
            "repeated": len(finished) - len(set(finished)),
            "metric": self.runs[0].metric.label,
            "best": _spread(self.best()),
            "last": _spread(self.last()),
            "test": {**tested, **kind._asdict()} if tested and kind else None,
        }


def _spread(values: dict[int, float]) -> dict[str, Any] | None:
    return asdict(Spread.of(list(values.values()))) if values else None


def _test_scores(run: RunFacts) -> dict[ScoreKind, float]:
    """Map each kind of test score of a run to the first score of that kind."""
    best = run.best()
    found: dict[ScoreKind, float] = {}
    for score in run.tested:
        at_best = best is not None and score.step == best[0]
        kind = ScoreKind(score.label, score.lower, score.protocol, score.statistics, at_best)
        found.setdefault(kind, score.value)
    return found


def score_kinds(runs: Sequence[RunFacts]) -> list[ScoreKind]:
    """List the kinds of test scores that finished runs have, each once."""
    finished = (run for run in runs if run.state == "finished")
    return list(dict.fromkeys(kind for run in finished for kind in _test_scores(run)))


def groups(runs: Sequence[RunFacts]) -> list[int]:
    """Number the runs by group. Runs of a group differ in seed, router and data folder only.

    The text in two data folders must be the same, and so must the labels of images.
    """
    seen: dict[str, int] = {}
    keys = [_group_key(run) + data for run, data in zip(runs, _data(runs), strict=True)]
    return [seen.setdefault(key, len(seen)) for key in keys]


def _data(runs: Sequence[RunFacts]) -> list[str]:
    """Return the checksum of each run's training text, or of the labels of its training images.

    A run without a checkpoint has that of a run with the same data folder, or else the only one.
    """
    states = [last_state(run.folder) for run in runs]
    found = [str(one.get("corpus_sha256") or one.get("labels_sha256") or "") for one in states]
    folders = [run.settings.get("data.folder", run.settings.get("data.source")) for run in runs]
    known = {folder: data for folder, data in zip(folders, found, strict=True) if data}
    only = next(iter(known.values())) if len(set(known.values())) == 1 else ""
    return [data or known.get(folder, only) for folder, data in zip(folders, found, strict=True)]


def _group_key(run: RunFacts) -> str:
    compared = {
        key: value
        for key, value in run.settings.items()
        if key not in NOT_COMPARED and not key.startswith(ROUTER)
    }
    return repr((run.kind, sorted(compared.items(), key=lambda item: item[0])))


def conditions(runs: Sequence[RunFacts]) -> list[Condition]:
    """Return the conditions of all groups, in the order of their first runs in each group."""
    found: dict[tuple[int, str], list[RunFacts]] = {}
    for group, run in sorted(zip(groups(runs), runs, strict=True), key=lambda pair: pair[0]):
        found.setdefault((group, _router_settings(run)), []).append(run)
    names = _names(list(found.values()))
    return [
        Condition(group=group, name=name, runs=tuple(own))
        for ((group, _), own), name in zip(found.items(), names, strict=True)
    ]


def _router_settings(run: RunFacts) -> str:
    settings = run.settings.items()
    return repr(sorted((key, repr(value)) for key, value in settings if key.startswith(ROUTER)))


def _names(found: list[list[RunFacts]]) -> list[str]:
    """Name a condition by its router, and by settings where several have the same router.

    A condition of one run has the name of the run.
    """
    names = []
    for runs in found:
        first = runs[0]
        same_router = [own[0] for own in found if own[0].router == first.router]
        apart = _differing(first, same_router)
        if len(runs) == 1:
            names.append(
                first.name if first.router in first.name else f"{first.name} ({first.router})"
            )
        else:
            shown = [f"{key.rpartition('.')[2]}={first.settings[key]}" for key in apart[:NAMED]]
            names.append(", ".join((first.router, *shown)))
    return names


def _differing(run: RunFacts, others: list[RunFacts]) -> list[str]:
    """List the settings of a run in which it differs from conditions with the same router."""
    return [
        key
        for key, value in run.settings.items()
        if key not in NOT_COMPARED and any(one.settings.get(key, value) != value for one in others)
    ]
