"""Tell how the cells of a study ended, also of cells whose data sets were not read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from acmoe.lab.study.cell import Cell
from acmoe.lab.study.planned import UNREAD
from acmoe.lab.study.results.records import Record, latest

LEFT = "left"  # the end of a cell that has no record
# Values that a grid takes from its data set: fields of the config's `model` and `data`.
_OF_DATA = {"model": {"vocab_size", "image_size", "num_classes"}, "data": {"size", "resize"}}


class Ended(NamedTuple):
    """A cell, the digest by which its record is found, and how it ended."""

    cell: Cell
    digest: str  # empty where it depends on data that were not read
    end: str  # status of the last record, or LEFT


def ended(cells: Sequence[Cell], records: Sequence[Record]) -> list[Ended]:
    """Find the last record of each cell.

    Without its data set, a cell has no digest. Its record is then the last one that is equal but
    for the data.
    """
    found = latest(records)
    by_digest = {record["digest"]: record for record in found}
    by_rest = {without_data(record): record for record in found}
    return [
        _ended(cell, by_rest.get(without_data(cell.to_json())), "")
        if cell.data == UNREAD
        else _ended(cell, by_digest.get(cell.digest), cell.digest)
        for cell in cells
    ]


def _ended(cell: Cell, record: Record | None, digest: str) -> Ended:
    if record is None:
        return Ended(cell, digest, LEFT)
    return Ended(cell, record["digest"], record["status"])


def without_data(record: Mapping[str, Any]) -> str:
    """Return what identifies a cell, but for its data set, as text."""
    kept = {name: record.get(name) for name in _IDENTITY}
    config = dict(kept["config"] or {})
    for part, fields in _OF_DATA.items():
        values = config.get(part) or {}
        config[part] = {name: value for name, value in values.items() if name not in fields}
    return json.dumps({**kept, "config": config}, sort_keys=True)


_IDENTITY = ("study", "setting", "condition", "factors", "seed", "size", "config", "tests")
