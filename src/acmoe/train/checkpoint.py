"""Checkpoints that are complete or absent, even if the writing process is killed.

A checkpoint is built under a hidden name, synced to disk and renamed; before it is removed it gets
a hidden name again. The leftovers of a killed process are therefore always hidden, and the next
process removes them, and nothing else that may be in the folder.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from acmoe.errors import UserError, check, typed_line
from acmoe.evaluate.run import EMA, STATE, checkpoints, step_folder
from acmoe.models.checkpoint import save
from acmoe.storage.atomic import damaged_name, report_write_errors, sha256_of, sync
from acmoe.storage.sealed import SEALED, read_sealed, sealed_text
from acmoe.storage.shards import SHARD, SHARDS
from acmoe.train.ema import WeightAverage

TENSORS = "training.safetensors"
PARTIAL = ".partial"
# Hidden folders that this module makes, and the files in them.
_HIDDEN = re.compile(r"\.partial|\.step-\d{8}")
_FILES = re.compile(
    r"(ema/)?(config\.json|weights-[0-9a-f]{12}\.safetensors|\.draft-[0-9a-f]{32}"
    r"|\.config\.json\.draft)|state\.json|training\.safetensors"
    rf"|{SHARDS}/{SHARD}"
)


class CheckpointStore:
    """The checkpoints of one run: the latest `keep`, and the best.

    Each checkpoint holds the model in the format of `acmoe.load`, the tensors of the training state
    (optimizer, random generators, memory), and a JSON state. The field `best` of the JSON state
    names the step of the best checkpoint. Where the run averages its weights, the folder `ema`
    holds the averaged model, also in the format of `acmoe.load`.

    Where every process writes a part, all tensors are in the folder `shards`: see saving.py.
    """

    def __init__(self, folder: Path, *, keep: int, writes: bool = True) -> None:
        self.folder, self.keep = folder, keep
        if not writes:  # another process of the run does
            return
        with report_write_errors(folder):
            folder.mkdir(exist_ok=True)
            for leftover in _leftovers(folder):
                shutil.rmtree(leftover)

    def latest(self) -> Path | None:
        """Return the folder of the latest checkpoint, if there is one."""
        found = checkpoints(self.folder)
        return found[-1] if found else None

    def interrupted(self) -> KeyboardInterrupt:
        """Return the exception for ctrl-C, which says what is saved and how to continue."""
        saved = self.latest()
        where = "nothing was saved yet" if saved is None else f"the last checkpoint is {saved}"
        return KeyboardInterrupt(f"{where}; give the same command again to continue")

    def save(
        self,
        step: int,
        model: nn.Module,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        *,
        average: WeightAverage | None = None,
    ) -> Path:
        """Write a checkpoint and return its folder, which appears only when it is complete.

        Raises:
            UserError: a value is NaN or infinite, or the disk cannot take the files. Earlier
                checkpoints stay as they are, and nothing else is left behind.
        """
        self.check_finite(step, {**model.state_dict(), **tensors})
        with report_write_errors(step_folder(self.folder, step)), self.discarding():
            save(model, self.partial)
            if average is not None:
                with average.applied():
                    save(model, self.partial / EMA)
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()},
                self.partial / TENSORS,
            )
            return self.complete(step, state, {})

    @property
    def partial(self) -> Path:
        """The folder of the checkpoint that is being written."""
        return self.folder / PARTIAL

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Remove the files written so far if an error leaves `with`."""
        try:
            yield
        except BaseException:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def complete(self, step: int, state: dict[str, Any], files: Mapping[str, str]) -> Path:
        """Write state.json beside the other files of the checkpoint, and rename its folder.

        Only the rename makes it a checkpoint. files: SHA-256 of files that are known already.
        """
        target = step_folder(self.folder, step)
        self._seal(self.partial, step, state, files)
        os.replace(self.partial, target)
        sync(self.folder)
        self._prune(state.get("best"))
        return target

    def _seal(
        self, partial: Path, step: int, state: dict[str, Any], known: Mapping[str, str]
    ) -> None:
        """Write the digests of all files to state.json, and sync all to disk."""
        names = _files_in(partial)
        files = {name: known.get(name) or sha256_of(partial / name) for name in names}
        document = {"step": step, "files": files, **state}
        (partial / STATE).write_text(sealed_text(document), encoding="utf-8")
        for file in partial.rglob("*"):
            sync(file)
        sync(partial)

    def check_finite(self, step: int, tensors: Mapping[str, Any]) -> None:
        """Raise a UserError where a tensor holds NaN or infinity."""
        bad = first_nonfinite(tensors)
        check(
            bad is None,
            f"step {step} is not saved: {bad}; {last_good(self.latest())}; try a lower lr, or "
            "clip=1.0, in another folder",
        )

    def read(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the training tensors and JSON state of a checkpoint; raise where it is damaged.

        There are no tensors where they are in the folder `shards`: each process reads its own.
        """
        fix = f"delete {folder} to resume from the checkpoint before it"
        state = read_sealed(folder / STATE, fix=fix)
        files = _listed_files(state, folder, fix)
        sharded = any(name.startswith(f"{SHARDS}/") for name in files)
        file = folder / TENSORS
        check(
            sharded or TENSORS in files or file.is_file(),
            f"{folder} holds weights only, written by `acmoe export --to run`: evaluate it, or "
            "train in another folder",
        )
        check(
            sharded or TENSORS in files, f"{folder / STATE} lists no checksum of {TENSORS}; {fix}"
        )
        _check_digests(files, folder, fix)
        check_state(state, folder, fix)
        if sharded:
            return {}, state
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise UserError(f"{file} is damaged ({error}); {fix}") from error
        # Clones have the alignment of torch's allocator: a GEMM may round differently without it.
        return {name: tensor.clone() for name, tensor in tensors.items()}, state

    def set_aside(self, folder: Path) -> Path:
        """Rename a damaged checkpoint, so that training can continue from the one before it."""
        aside = damaged_name(folder)
        with report_write_errors(aside):
            os.replace(folder, aside)
        return aside

    def _prune(self, best: dict[str, Any] | None) -> None:
        found = checkpoints(self.folder)
        kept = {*found[-self.keep :], *([step_folder(self.folder, best["step"])] if best else [])}
        for old in found:
            if old not in kept:
                hidden = old.with_name(f".{old.name}")
                os.replace(old, hidden)
                shutil.rmtree(hidden)


def _leftovers(folder: Path) -> Iterator[Path]:
    """Yield the hidden folders that a killed process left, and no others.

    A folder is ours if it has one of our names, is no symbolic link, and holds only files with
    names of ours. Anything else in `checkpoints/` belongs to the user.
    """
    for entry in sorted(folder.iterdir()):
        if not _HIDDEN.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
            continue
        if all(_FILES.fullmatch(name) for name in _files_in(entry)):
            yield entry


def _files_in(folder: Path) -> list[str]:
    """List what is below a folder, by relative path, without the folders `ema` and `shards`."""
    found = sorted(folder.rglob("*"))
    names = [path.relative_to(folder).as_posix() for path in found]
    return [
        name
        for name, path in zip(names, found, strict=True)
        if name not in (EMA, SHARDS) or path.is_symlink() or not path.is_dir()
    ]


def _listed_files(state: Mapping[str, Any], folder: Path, fix: str) -> dict[str, Any]:
    """Return the SHA-256 digests by file name that state.json lists."""
    check(
        state.get("format") in (1, SEALED),
        f"{folder / STATE} has format {state.get('format')!r}; this acmoe reads 1 and {SEALED}: "
        "use the version that wrote it",
    )
    files = state.get("files") if state["format"] == SEALED else {TENSORS: state.get("sha256")}
    if not isinstance(files, dict):
        raise UserError(f"{folder / STATE} lists no files; {fix}")
    return files


def _check_digests(files: Mapping[str, Any], folder: Path, fix: str) -> None:
    """Raise a UserError unless every listed file is there and has its digest."""
    for name, digest in files.items():
        path = folder / name
        check(bool(_FILES.fullmatch(name)), f"{folder / STATE} names {name!r}; {fix}")
        check(path.is_file(), f"{path} is missing; {fix}")
        check(sha256_of(path) == digest, f"{path} is damaged, its checksum differs; {fix}")


def check_state(state: Mapping[str, Any], folder: Path, fix: str) -> None:
    """Check the fields of a JSON state that every run has."""
    step, best = state.get("step"), state.get("best")
    check(
        type(step) is int and folder.name in (step_folder(folder, step).name, PARTIAL),
        f"{folder / STATE} is of step {step!r}; {fix}",
    )
    check(
        best is None or (isinstance(best, dict) and type(best.get("step")) is int),
        f"{folder / STATE} has best={best!r}, which names no step; {fix}",
    )


def last_good(latest: Path | None) -> str:
    """Return the part of an error about a run that says which checkpoint can still be used."""
    return f"the last good checkpoint is {latest}" if latest else "no checkpoint was written before"


def first_nonfinite(tensors: Mapping[str, Any]) -> str | None:
    """Describe the first tensor that holds NaN or infinity; None where all are finite.

    The device is waited for once, unless something is wrong.
    """
    floats = {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }
    flags = [tensor.isfinite().all().cpu() for tensor in floats.values()]
    if not flags or bool(torch.stack(flags).all()):
        return None
    name = next(name for name, flag in zip(floats, flags, strict=True) if not flag)
    tensor = floats[name]
    return f"{name} holds {float(tensor[~tensor.isfinite()].flatten()[0])}"


@contextmanager
def restoring(folder: Path) -> Iterator[None]:
    """Report a training state that does not fit the run, as no file that acmoe wrote has."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the training state in {folder} does not fit this run ({typed_line(error)}); it may "
            "be of another run. Move the folder away to resume from the checkpoint before it"
        ) from error
