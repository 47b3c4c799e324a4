"""Saved results of an attack, one batch per line, so that a killed attack can resume."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acmoe.errors import check
from acmoe.storage.atomic import report_write_errors
from acmoe.storage.lines import append_to, read_lines
from acmoe.storage.lock import open_regular, take_lock

Record = dict[str, Any]


class AttackJournal:
    """A .jsonl file: the settings first, then one record for each batch and radius.

    Each line is written and synced before the next batch begins. Only the last line can be
    incomplete after a crash; it is dropped, and its batch is attacked again.
    """

    def __init__(
        self, handle: int | None = None, records: Sequence[Record] = (), path: Path = Path()
    ) -> None:
        self._handle = handle  # None: keep records in memory only
        self.path = path
        self.done = {(record["eps"], record["batch"]): record for record in records}

    def add(self, record: Record) -> None:
        """Save the record of one batch."""
        if self._handle is not None:
            _append(self._handle, record, self.path)
        self.done[record["eps"], record["batch"]] = record

    def saved(self) -> set[tuple[float, int]]:
        """Return the radius and number of every batch in the file, as a later call will find it.

        Ctrl-C may come after a line was written and before `done` has it.
        """
        records = read_lines(self.path).records[1:]
        return {(record["eps"], record["batch"]) for record in records}


@contextlib.contextmanager
def open_journal(folder: Path, settings: Record) -> Iterator[AttackJournal]:
    """Open the journal of those settings in a folder. Each choice of settings has its own file."""
    digest = hashlib.sha256(_line(settings)).hexdigest()
    path = folder / f"attack-{settings['attack']['name']}-{digest[:12]}.jsonl"
    with report_write_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
    handle = open_regular(path, append=True)
    try:
        take_lock(handle, f"{path} is in use by another process; wait for it")
        yield AttackJournal(handle, _read(handle, path, settings), path)
    finally:
        os.close(handle)


def _read(handle: int, path: Path, settings: Record) -> list[Record]:
    """Return the complete records, and drop an incomplete last line; start an empty file."""
    lines = read_lines(path)
    with report_write_errors(path):
        os.ftruncate(handle, lines.size)
    if lines.size == 0:
        _append(handle, settings, path)
        return []
    check(
        not lines.damaged,
        f"{path} is damaged in line {lines.damaged[:1]}; delete it to attack anew",
    )
    first, *records = lines.records
    strange = [n for n, record in enumerate(records, start=2) if not _is_batch(record)]
    check(
        not strange,
        f"{path} has no result of a batch in line {strange[:1]}; delete it to attack anew",
    )
    check(
        first == json.loads(_line(settings)),
        f"{path} was begun with other settings; delete it to attack anew",
    )
    return records


def _is_batch(record: Record) -> bool:
    """Return True for a record that names its radius and the number of its batch."""
    return type(record.get("eps")) in (int, float) and type(record.get("batch")) is int


def _append(handle: int, record: Record, path: Path) -> None:
    """Append a record, and sync it to disk."""
    append_to(handle, record, path)
    with report_write_errors(path):
        os.fsync(handle)


def _line(record: Record) -> bytes:
    return (json.dumps(record, sort_keys=True) + "\n").encode()


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of a model's state_dict, to tell results of other weights apart."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        tensors = value.values() if isinstance(value, dict) else [value]
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
