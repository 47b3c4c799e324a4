"""Checkpoints that are whole or absent, whatever kills the process that writes them.

A checkpoint is built under a hidden name, synced to disk and renamed; a removed one is hidden
first. What a killed process leaves behind therefore never looks like a checkpoint, and the next one
clears it away.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from acmoe.data.folders import sync
from acmoe.errors import UserError, check
from acmoe.evaluate.run import STATE, checkpoints, read_json, step_folder
from acmoe.models.checkpoint import save

FORMAT = 1
TENSORS = "training.safetensors"


class CheckpointStore:
    """The checkpoints of one run: the latest `keep`, and the best.

    Each holds the model, as `acmoe.load` reads it; tensors of the training; and a JSON state, whose
    `best` names the step of the best checkpoint.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        folder.mkdir(exist_ok=True)
        for leftover in folder.glob(".*"):
            shutil.rmtree(leftover)

    def latest(self) -> Path | None:
        found = checkpoints(self.folder)
        return found[-1] if found else None

    def save(
        self, step: int, model: nn.Module, tensors: dict[str, Tensor], state: dict[str, Any]
    ) -> Path:
        """Write a checkpoint; it exists once this returns, and not before it is complete."""
        partial = self.folder / ".partial"
        save(model, partial)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, partial / TENSORS
        )
        document = {"format": FORMAT, "step": step, "sha256": _sha256(partial / TENSORS), **state}
        (partial / STATE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        target = step_folder(self.folder, step)
        os.replace(partial, target)
        sync(self.folder)
        self._prune(state.get("best"))
        return target

    def read(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and state of a checkpoint, refused when they are damaged."""
        state = read_json(folder / STATE)
        check(
            state.get("format") == FORMAT,
            f"{folder / STATE} has format {state.get('format')!r}; this acmoe reads {FORMAT}",
        )
        file, fix = folder / TENSORS, f"delete {folder} to resume from the checkpoint before it"
        check(file.is_file(), f"{file} is missing; {fix}")
        check(_sha256(file) == state["sha256"], f"{file} is damaged, its checksum differs; {fix}")
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise UserError(f"{file} is damaged ({error}); {fix}") from error
        # Copies are aligned as torch allocates; matrix products may round otherwise by alignment.
        return {name: tensor.clone() for name, tensor in tensors.items()}, state

    def _prune(self, best: dict[str, Any] | None) -> None:
        found = checkpoints(self.folder)
        kept = {*found[-self.keep :], *([step_folder(self.folder, best["step"])] if best else [])}
        for old in found:
            if old not in kept:
                hidden = old.with_name(f".{old.name}")
                os.replace(old, hidden)
                shutil.rmtree(hidden)


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
