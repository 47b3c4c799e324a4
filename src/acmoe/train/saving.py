"""Write the checkpoints of a run: by the first process, or by all, also in the background."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from acmoe.distributed.ranks import own_part
from acmoe.distributed.staging import Staging
from acmoe.errors import UserError, check
from acmoe.evaluate.run import step_folder
from acmoe.models.checkpoint import write_config
from acmoe.storage.atomic import report_write_errors
from acmoe.storage.shards import SHARDS, Writing, digests, joint_digest, write_shards
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.metrics_log import MetricsLog
from acmoe.train.threads import cpu_state
from acmoe.train.trainer import Trainer


class Pending(NamedTuple):
    """A checkpoint that is written in the background, with the JSON state of its step."""

    step: int
    state: dict[str, Any]
    writing: Writing


class Saver:
    """Saves everything that an update changes; all processes must call its methods in one order."""

    def __init__(self, store: CheckpointStore, trainer: Trainer, log: MetricsLog) -> None:
        self.store, self.trainer, self.log = store, trainer, log
        self.pending: Pending | None = None
        self.how = trainer.config.parallel.save
        self.staging = Staging(trainer.ranks) if self.how == "async" else None

    def save(self, step: int) -> None:
        """Write a checkpoint, or begin to write it."""
        self.finish()
        # Without this check a run folder that was renamed under way would be split into two.
        check(
            self.store.folder.is_dir(),
            f"{self.store.folder} is gone, so step {step} is not saved: the run folder was renamed "
            "or deleted under way; continue it with --out and its new name",
        )
        state: dict[str, Any] = {
            **self.log.state_dict(),
            "data": self.trainer.batches.state_dict(),
            "split": self.trainer.config.split,
            **cpu_state(),
            **self.trainer.data_checksum(),
        }
        self.log.sync()
        if self.how == "whole":
            self._save_whole(step, state)
        else:
            self._save_shards(step, state)

    def _save_whole(self, step: int, state: dict[str, Any]) -> None:
        trainer = self.trainer
        model, tensors = trainer.whole_model(), trainer.state_tensors()
        if trainer.ranks.first:
            self.store.save(step, model, tensors, state, average=trainer.average)
        trainer.ranks.wait()  # none goes on, or ends, before the checkpoint is there

    def _save_shards(self, step: int, state: dict[str, Any]) -> None:
        shards, folder = self.trainer.shards(), self.store.partial / SHARDS
        self._check_finite(step, shards)
        if self.trainer.ranks.first:
            with report_write_errors(folder):
                folder.mkdir(parents=True)
        self.trainer.ranks.wait()
        with self.store.discarding():
            if self.staging is not None:
                writing = Writing(folder, self.staging.copy(shards), self.staging.group)
                self.pending = Pending(step, state, writing)
                return
            write_shards(folder, shards)
            self._complete(step, state)

    def _check_finite(self, step: int, shards: Mapping[str, Tensor]) -> None:
        """Raise on all processes where a tensor of one is not finite: none must wait for it."""
        try:
            self.store.check_finite(step, {name: own_part(one) for name, one in shards.items()})
            said = None
        except UserError as error:
            said = str(error)
        found = [one for one in self.trainer.ranks.gather(said) if one is not None]
        check(not found, found[0] if found else "")

    def _complete(self, step: int, state: dict[str, Any]) -> None:
        """Make a checkpoint of the written shards; each process computes the digest of its own."""
        ranks, folder = self.trainer.ranks, self.store.partial / SHARDS
        own = digests(folder, f"shard-{ranks.rank + 1:05d}-*.safetensors")
        found = {name: one for part in ranks.gather(own) for name, one in part.items()}
        if ranks.first:
            with report_write_errors(step_folder(self.store.folder, step)):
                write_config(self.trainer.model, self.store.partial, SHARDS, joint_digest(found))
                known = {f"{SHARDS}/{name}": digest for name, digest in found.items()}
                self.store.complete(step, state, known)
        ranks.wait()

    def poll(self) -> None:
        """Complete the checkpoint in the background if all processes have written their shards."""
        if self.pending is not None:
            waiting = self.trainer.ranks.largest(not self.pending.writing.done())
            if not waiting:
                self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is written in the background, and complete it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            with self.store.discarding():
                pending.writing.wait()
                self._complete(pending.step, pending.state)
