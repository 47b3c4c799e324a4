"""The way through a run's updates, the same whatever is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.display import Display
from acmoe.train.health import stopped
from acmoe.train.interrupt import Interrupts
from acmoe.train.journal import Journal, Scored
from acmoe.train.update import Update


class AnyTrainer(Protocol):
    """What a course asks of a trainer."""

    recent: list[Any]  # batches since somebody last looked whether the losses are finite

    @property
    def model(self) -> nn.Module: ...
    @property
    def config(self) -> Any: ...
    @property
    def per_step(self) -> int:
        """Tokens or images of an update."""
        ...

    def learning_rate(self, step: int) -> float: ...
    def update(self, step: int, *, record: bool) -> Update: ...
    def replay(self, batch: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Course:
    """A trainer, and everything that watches it."""

    trainer: AnyTrainer
    journal: Journal
    store: CheckpointStore
    display: Display
    asked: Interrupts
    steps: int  # updates of the whole run
    validate: Callable[[], Scored]
    save: Callable[[int], None]  # a checkpoint after that step

    def run(self, step: int) -> int:
        """Go on behind `step`, to the end or until a signal asks to stop; the step reached."""
        trainer, journal, display, config = (
            self.trainer,
            self.journal,
            self.display,
            self.trainer.config,
        )
        display.begin(step, journal)
        stopping = False
        while step < self.steps and not stopping:
            step += 1
            log, validate, save = (
                step % every == 0 or step == self.steps
                for every in (config.log_every, config.eval_every, config.checkpoint_every)
            )
            update = trainer.update(step, record=log)
            journal.note(update, trainer.per_step)
            stopping = self.asked.signal is not None
            if not (log or validate or save or stopping):
                continue
            bad = journal.look()  # the one place where the host waits for the device
            if bad is not None:
                raise stopped(trainer, step, bad, self.store.latest())
            trainer.recent.clear()
            if log:
                rate = trainer.learning_rate(step)
                display.train(journal.train_record(step, rate, update.loads))
            with journal.paused():
                if validate:
                    display.valid(journal.valid_record(step, self.validate()))
                if save or stopping or (validate and journal.best_step == step):
                    self.save(step)
        return step

    def signal_at(self, step: int) -> int | None:
        """The signal that ended the run before its last step, if one did."""
        return self.asked.signal if step < self.steps else None
