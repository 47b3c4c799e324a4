"""Tensors in a folder of safetensors files, of which every process writes one.

torch.distributed.checkpoint (DCP) plans who writes and reads which part. The header of a file says
where its parts lie in the whole tensors, so any number of processes can read the folder, each the
parts that it needs; nothing in it is executable. DCP is imported where it is used: that takes
0.5 s, which other commands save.
"""

import hashlib
import json
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from acmoe.errors import UserError, check, first_line
from acmoe.storage.atomic import report_write_errors, sha256_of

SHARDS = "shards"  # the folder's name in a checkpoint
THREAD = "write-shards"  # name of the threads that write in the background
SHARD = r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"  # names of the files, given by DCP


class Stored(NamedTuple):
    """Shape and dtype of a whole tensor in the files."""

    shape: torch.Size
    dtype: torch.dtype


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Write this process's parts; all processes of the group, or of the default one, must call it.

    A DTensor is written by the processes that hold its parts, any other tensor by one of those that
    have it.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    with _reporting(folder), _alone_without_warning(not dist.is_initialized()):
        save(dict(tensors), storage_writer=_writer(folder), process_group=group)


class Writing:
    """A `write_shards` in a thread; the tensors must not change meanwhile."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        self.future: Future[None] = Future()
        # A daemon: a process that ends because another has failed must not wait for that other.
        threading.Thread(
            target=self._write, args=(folder, tensors, group), name=THREAD, daemon=True
        ).start()

    def _write(self, *arguments: Any) -> None:
        try:
            write_shards(*arguments)
            self.future.set_result(None)
        except BaseException as error:  # `wait` raises it
            self.future.set_exception(error)

    def done(self) -> bool:
        """Return True when all parts are written, or writing has failed."""
        return self.future.done()

    def wait(self) -> None:
        """Wait until all processes have written their parts; raise what `write_shards` raises."""
        self.future.result()


def leave_writing(seconds: float) -> None:
    """Wait for threads that still write checkpoints, for at most `seconds` each.

    Call it after a failure has broken off their collectives. Python aborts with a core dump if it
    ends while such a thread is inside torch.distributed.
    """
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(seconds)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors that the files hold; raise where a part of one is missing."""
    with _reading(folder):
        found = _reader(folder).read_metadata().state_dict_metadata
    for name, tensor in found.items():
        parts = sum(prod(part.sizes) for part in tensor.chunks)
        check(
            parts == prod(tensor.size),
            f"{folder} holds {parts:,} of the {prod(tensor.size):,} numbers of {name}: a file is "
            "missing or damaged; restore it from a copy",
        )
    return {name: Stored(one.size, one.properties.dtype) for name, one in found.items()}


def read_shards(folder: Path, tensors: Mapping[str, Tensor], *, together: bool = False) -> None:
    """Fill the tensors, whole ones and DTensors, in place.

    With `together`, all processes of the default group must call it; each may give other names.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    with _reading(folder), _alone_without_warning(not together):
        load(dict(tensors), storage_reader=_reader(folder), no_dist=not together)


def digests(folder: Path, pattern: str = "*.safetensors") -> dict[str, str]:
    """Return the SHA-256 of each file by its name."""
    return {path.name: sha256_of(path) for path in sorted(folder.glob(pattern))}


def joint_digest(found: Mapping[str, str]) -> str:
    """Return one SHA-256 for the names and digests of all files."""
    lines = [f"{name} {digest}\n" for name, digest in sorted(found.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _writer(folder: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return HuggingFaceStorageWriter(str(folder), save_distributed=True)


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(folder))


@contextmanager
def _alone_without_warning(alone: bool) -> Iterator[None]:
    """Silence DCP's remark that a single process saves or loads."""
    if not alone:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


@contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    """Turn an error of any process, which DCP raises in all, into one line."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with report_write_errors(folder):
            yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        where = f"rank {rank}: " if dist.is_initialized() else ""
        said = UserError(
            f"{where}cannot write {folder}: {getattr(error, 'strerror', None) or error}; make room "
            "or choose another folder, then give the same command again"
        )
        said.of_all_ranks = True  # type: ignore[attr-defined]
        raise said from error


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        raise UserError(
            f"{folder} cannot be read (rank {rank}: {first_line(error)}); restore it from a copy, "
            "or use another checkpoint"
        ) from error
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} is damaged ({first_line(error)}); restore it from a copy, or use another "
            "checkpoint"
        ) from error
