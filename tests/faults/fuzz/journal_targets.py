"""Fuzz targets of logs: metrics of a run, records of a study, the journal of an attack."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from acmoe.evaluate.images.attack_journal import open_journal
from acmoe.evaluate.run import open_run
from acmoe.lab.study.results.records import latest, open_results, read_results
from acmoe.report.runs import read_run
from acmoe.storage.lines import line_of
from acmoe.train.metrics_log import drop_records_after
from faults.fuzz.common import (
    CHANGES,
    JSON,
    TEXTS,
    Target,
    allowed,
    changed,
    json_bytes,
    leaves_files,
)
from faults.fuzz.materials import empty, fresh, run
from study_cases import record

METRIC = {"kind": "valid", "step": 1, "loss": 2.5, "bits_per_byte": 3.6, "seconds": 3.0}
RECORD = record("smoe", 0, 1.5)
SETTINGS = {"attack": {"name": "pgd", "steps": 1}, "eps": [0.1], "model": "abc"}
BATCH = {"eps": 0.1, "batch": 0, "images": 8, "right": 3, "attacked": 1}


def _lines(good: dict[str, Any]) -> st.SearchStrategy[list[bytes]]:
    """Lines with and without a checksum: good ones, changed ones, other JSON, other bytes."""
    documents = st.just(good) | st.builds(changed, st.just(good), CHANGES)
    objects = documents | st.dictionaries(TEXTS, JSON, max_size=3)
    sealed = objects.filter(lambda one: isinstance(one, dict)).map(_sealed)
    plain = (objects | JSON).map(lambda one: json_bytes(one) + b"\n")
    return st.lists(sealed | plain | st.binary(max_size=20), max_size=5)


def _sealed(document: dict[str, Any]) -> bytes:
    try:
        return line_of(document)
    except (TypeError, ValueError):  # keys that are no texts, lone surrogates
        return json_bytes(document) + b"\n"


def _metrics(lines: list[bytes]) -> None:
    folder = fresh(run())
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    leaves_files(folder, lambda: open_run(folder).metrics("train"))
    leaves_files(folder, lambda: _facts(folder))
    before = path.read_bytes()
    allowed(lambda: drop_records_after(path, 2, expected=3))
    whole = all(line in path.read_bytes() for line in before.split(b"\n")[:-1])
    kept = [one for one in folder.glob("metrics.jsonl.damaged-*") if one.read_bytes() == before]
    dropped = drop_records_after(path, 2)[1]
    assert whole or kept or dropped is None


def _facts(folder: Path) -> None:
    facts = read_run(folder, "run")
    _ = facts.step, facts.state, facts.metric, facts.scores(), facts.best()


def _study(lines: list[bytes]) -> None:
    folder = empty()
    path = folder / "results.jsonl"
    path.write_bytes(b"".join(lines))
    leaves_files(folder, lambda: latest(read_results(path)))

    def reopen() -> None:
        with open_results(path) as results:
            results.status("smoe-0")

    allowed(reopen)
    _keeps_whole_lines(path, lines)


def _attack(lines: list[bytes]) -> None:
    folder = empty()
    with open_journal(folder, SETTINGS):
        pass
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes() + b"".join(lines))

    def reopen() -> None:
        with open_journal(folder, SETTINGS) as journal:
            _ = [record["batch"] for record in journal.done.values()]

    allowed(reopen)
    _keeps_whole_lines(path, lines)


def _keeps_whole_lines(path: Path, lines: list[bytes]) -> None:
    """Opening a log for writing drops an incomplete last line, or nothing."""
    written = b"".join(lines)
    whole = written[: written.rfind(b"\n") + 1]
    assert path.read_bytes().endswith((written, whole)), "a whole line was lost"


TARGETS = (
    Target("metrics.jsonl", _lines(METRIC), _metrics),
    Target("study records", _lines(RECORD), _study),
    Target("attack journal", _lines(BATCH), _attack),
)
