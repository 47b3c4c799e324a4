"""What a checkpoint of a run holds, so that continuing it is the uninterrupted run, bit by bit."""

from typing import Any, cast

import torch
from torch import Tensor

from acmoe.data.text.corpus import Corpus
from acmoe.errors import check
from acmoe.models.checkpoint import load
from acmoe.models.text.decoder import Memory
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.journal import Journal
from acmoe.train.optim import optimizer_tensors, restore_optimizer
from acmoe.train.step import Trainer


def save_run(
    store: CheckpointStore, step: int, trainer: Trainer, journal: Journal, corpus: Corpus
) -> None:
    """A checkpoint of everything a step changes."""
    tensors = optimizer_tensors(trainer.optimizer, trainer.model)
    for part, memory in enumerate(trainer.memories):
        for depth, hidden in enumerate(memory.hidden if memory else ()):
            tensors[f"memory/{part}/{depth}"] = hidden
    tensors |= rng_tensors(trainer.device)
    state: dict[str, Any] = {
        **journal.state_dict(),
        "data": trainer.batches.state_dict(),
        "corpus_sha256": corpus.manifest.splits["train"].sha256,
    }
    store.save(step, trainer.model, tensors, state)


def resume_run(store: CheckpointStore, trainer: Trainer, journal: Journal, corpus: Corpus) -> int:
    """Continue from the latest checkpoint, if there is one; the step it was made after."""
    folder = store.latest()
    if folder is None:
        journal.open(0)
        return 0
    tensors, state = store.read(folder)
    check(
        state["corpus_sha256"] == corpus.manifest.splits["train"].sha256,
        f"{corpus.folder} is not the corpus this run was begun with (another checksum); prepare "
        "that one again, or choose another run folder",
    )
    trainer.model.load_state_dict(load(folder).state_dict())
    restore_optimizer(trainer.optimizer, trainer.model, tensors)
    trainer.memories = _memories(tensors, trainer)
    trainer.batches.load_state_dict(state["data"])
    restore_rng(tensors, trainer.device)
    step = cast(int, state["step"])
    journal.load_state_dict(state)
    journal.open(step)
    return step


def _memories(tensors: dict[str, Tensor], trainer: Trainer) -> list[Memory | None]:
    memories: list[Memory | None] = []
    for part in range(trainer.config.split):
        names = [f"memory/{part}/{depth}" for depth in range(len(trainer.model.blocks))]
        memories.append(Memory(tuple(tensors[name].to(trainer.device) for name in names)))
    return memories


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """The state of the random streams dropout and noise draw from."""
    tensors = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_rng(tensors: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["rng/cpu"])
    # Saved on a CPU and continued on a GPU: there is no such state, and no bitwise promise either.
    if device.type == "cuda" and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"], device)
