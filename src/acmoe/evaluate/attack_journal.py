"""Saved results of an attack, one batch per line, so that a killed attack can resume."""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acmoe.errors import UserError, check

if sys.platform != "win32":
    import fcntl

Record = dict[str, Any]


class AttackJournal:
    """A .jsonl file: the settings first, then one record for each batch and radius.

    Each line is written and synced before the next batch begins. Only the last line can be
    incomplete after a crash; it is dropped, and its batch is attacked again.
    """

    def __init__(self, handle: int | None = None, records: Sequence[Record] = ()) -> None:
        self._handle = handle  # None: keep records in memory only
        self.done = {(record["eps"], record["batch"]): record for record in records}

    def add(self, record: Record) -> None:
        """Save the record of one batch."""
        if self._handle is not None:
            os.write(self._handle, _line(record))
            os.fsync(self._handle)
        self.done[record["eps"], record["batch"]] = record


@contextlib.contextmanager
def open_journal(folder: Path, settings: Record) -> Iterator[AttackJournal]:
    """Open the journal of those settings in a folder. Each choice of settings has its own file."""
    digest = hashlib.sha256(_line(settings)).hexdigest()
    path = folder / f"attack-{settings['attack']['name']}-{digest[:12]}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    try:
        _lock(handle, path)
        records = _read(handle, path, settings)
        yield AttackJournal(handle, records)
    finally:
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    if sys.platform != "win32":  # no flock: only one process may use a journal at a time
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is in use by another process; wait for it") from None


def _read(handle: int, path: Path, settings: Record) -> list[Record]:
    """Return the complete records, and drop an incomplete last line; start an empty file."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    os.truncate(handle, whole)
    if whole == 0:
        os.write(handle, _line(settings))
        os.fsync(handle)
        return []
    try:
        first, *records = [json.loads(line) for line in content[:whole].splitlines()]
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it to attack anew") from error
    check(
        first == json.loads(_line(settings)),
        f"{path} was begun with other settings; delete it to attack anew",
    )
    return records


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
