"""The training loop, the same for text and images."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from acmoe.errors import NonFiniteError
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.display import Display
from acmoe.train.health import training_stopped, validation_stopped
from acmoe.train.metrics_log import MetricsLog, Score
from acmoe.train.resume import resume_run
from acmoe.train.saving import Saver
from acmoe.train.signals import StopSignals
from acmoe.train.trainer import Trainer
from acmoe.train.update import Update

HUGE_LOSS = 1000.0  # nats; a uniform guess over a million classes has 13.8


@dataclass(frozen=True, kw_only=True)
class TrainLoop:
    """Takes a trainer's updates one after another; logs, validates and saves between them."""

    trainer: Trainer
    log: MetricsLog
    store: CheckpointStore | None  # None: nothing is saved or resumed
    display: Display
    signals: StopSignals
    save_best: bool = True  # save after a validation that is the best so far, too
    started: Callable[[int], None] | None = None  # called with the step that training goes on from

    def run(self) -> int:
        """Train from the latest checkpoint to the last step or a stop signal; return the step."""
        with contextlib.closing(self.log):
            return self._run()

    def _begin(self) -> int:
        """Load the latest checkpoint, if any; return the step that training goes on from."""
        step, notes = resume_run(self.store, self.trainer, self.log)
        if self.started is not None:
            self.started(step)
        self.display.begin(step, self.log)
        for note in (*self.trainer.notes, *notes):
            self.display.say(note)
        return step

    def _run(self) -> int:
        config, last = self.trainer.config, self.trainer.steps
        step = self._begin()
        saver = None if self.store is None else Saver(self.store, self.trainer, self.log)
        stopping = False
        while step < last and not stopping:
            step += 1
            log, validate, save = (
                step % every == 0 or step == last
                for every in (config.log_every, config.eval_every, config.checkpoint_every)
            )
            update = self.trainer.update(step, record=log)
            self.log.add(update, self.trainer.per_step)
            stopping = self._stop_requested()
            if saver is not None:
                saver.poll()
            if not (log or validate or save or stopping):
                continue
            self._check_finite(step)
            if log:
                self._log_update(step, update)
            with self.log.paused():
                if validate:
                    self.display.valid(self.log.valid_record(step, self._validate(step)))
                best = validate and self.save_best and self.log.best_step == step
                if saver is not None and (save or stopping or best):
                    saver.save(step)
        if saver is not None:
            saver.finish()
        return step

    def _stop_requested(self) -> bool:
        """Return True if any process has received a stop signal: all stop after the same step."""
        self.signals.received = self.trainer.ranks.largest(self.signals.received or 0) or None
        return self.signals.received is not None

    def signal_at(self, step: int) -> int | None:
        """Return the signal that stopped the run at `step`; None where it ended by itself."""
        return self.signals.received if step < self.trainer.steps else None

    def _check_finite(self, step: int) -> None:
        """Read the losses since the last check: only here does the host wait for the device."""
        bad = self.log.read_losses()
        if bad is not None:
            good = None if self.store is None else self.store.latest()
            raise training_stopped(self.trainer, step, bad, good)
        self.trainer.recent.clear()

    def _validate(self, step: int) -> Score:
        """Score the validation split; a score that is not finite ends the run."""
        try:
            return self.trainer.validate()
        except NonFiniteError as error:
            good = None if self.store is None else self.store.latest()
            raise validation_stopped(self.trainer, step, error, good) from error

    def _log_update(self, step: int, update: Update) -> None:
        rate = self.trainer.learning_rate(step)
        record = self.log.train_record(step, rate, update.loads)
        self.display.train(record)
        if record["loss"] > HUGE_LOSS:
            self.display.say(
                f"step {step}: a loss of {record['loss']:.3g} nats is finite, but no model of "
                f"anything; try a lower lr than {rate:.3g}, or clip=1.0"
            )
