"""Checkpoints that are complete or absent, even if the writing process is killed.

A checkpoint is built under a hidden name, synced to disk and renamed; before it is removed it gets
a hidden name again. The leftovers of a killed process are therefore always hidden, and the next
process removes them.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from acmoe.data.folders import sync
from acmoe.errors import UserError, check
from acmoe.evaluate.run import EMA, STATE, checkpoints, read_json, step_folder
from acmoe.models.checkpoint import save
from acmoe.runtime import rng_states, set_rng_states
from acmoe.train.ema import WeightAverage

FORMAT = 1
TENSORS = "training.safetensors"


class CheckpointStore:
    """The checkpoints of one run: the latest `keep`, and the best.

    Each checkpoint holds the model in the format of `acmoe.load`, the tensors of the training state
    (optimizer, random generators, memory), and a JSON state. The field `best` of the JSON state
    names the step of the best checkpoint. Where the run averages its weights, the folder `ema`
    holds the averaged model, also in the format of `acmoe.load`.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        folder.mkdir(exist_ok=True)
        for leftover in folder.glob(".*"):
            shutil.rmtree(leftover)

    def latest(self) -> Path | None:
        """Return the folder of the latest checkpoint, if there is one."""
        found = checkpoints(self.folder)
        return found[-1] if found else None

    def save(
        self,
        step: int,
        model: nn.Module,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        *,
        average: WeightAverage | None = None,
    ) -> Path:
        """Write a checkpoint and return its folder, which appears only when it is complete."""
        partial = self.folder / ".partial"
        save(model, partial)
        if average is not None:
            with average.applied():
                save(model, partial / EMA)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, partial / TENSORS
        )
        document = {"format": FORMAT, "step": step, "sha256": _sha256(partial / TENSORS), **state}
        (partial / STATE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        for file in partial.rglob("*"):
            sync(file)
        sync(partial)
        target = step_folder(self.folder, step)
        os.replace(partial, target)
        sync(self.folder)
        self._prune(state.get("best"))
        return target

    def read(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the training tensors and JSON state of a checkpoint; raise where it is damaged."""
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
        # Clones have the alignment of torch's allocator: a GEMM may round differently without it.
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
    """Replace a file's content atomically."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the CPU's and the device's global random generator.

    Dropout and routing noise draw from these generators.
    """
    return {f"rng/{kind}": state for kind, state in rng_states(device).items()}


def restore_rng(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore what `rng_tensors` returned; other tensors are ignored."""
    # A run saved on a CPU and resumed on a GPU has no such state, and no promise of equal bits.
    kinds = [name.removeprefix("rng/") for name in tensors if name.startswith("rng/")]
    set_rng_states({kind: tensors[f"rng/{kind}"] for kind in kinds}, device)
