"""The training loop."""

from pathlib import Path

from rich.console import Console

from acmoe.config.train import RunConfig
from acmoe.evaluate.device import pick_device, seeded
from acmoe.evaluate.language import check_vocabulary, metric_of
from acmoe.evaluate.run import CHECKPOINTS, open_corpus
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.display import Display
from acmoe.train.health import stopped
from acmoe.train.interrupt import Interrupts
from acmoe.train.journal import Journal
from acmoe.train.optim import learning_rate
from acmoe.train.resume import resume_run, save_run
from acmoe.train.run_folder import claim, keep_vocabulary
from acmoe.train.step import Trainer
from acmoe.train.summary import Summary


def train(config: RunConfig, folder: Path | str, *, console: Console | None = None) -> Summary:
    """Train in `folder`, or continue what is there; the same call does both.

    Raises:
        TrainingStopped: the loss is no finite number any more.
        UserError: the folder belongs to another run or process, or the corpus does not fit.
    """
    folder, device = Path(folder), pick_device(config.device)
    corpus = open_corpus(config.data)
    check_vocabulary(config.model.vocab_size, corpus)
    metric, valid = metric_of(corpus), corpus["valid"][: config.eval_tokens]
    display = Display(folder.name, config.steps, console)
    with claim(folder, config), seeded(config.seed, device), Interrupts() as asked, display:
        keep_vocabulary(corpus.vocabulary, folder)
        trainer, journal = Trainer(config, corpus, device), Journal(folder, metric)
        store = CheckpointStore(folder / CHECKPOINTS, keep=config.keep)
        step, stopping = resume_run(store, trainer, journal, corpus), False
        display.begin(step, journal)
        while step < config.steps and not stopping:
            step += 1
            log, validate, save = (
                step % every == 0 or step == config.steps
                for every in (config.log_every, config.eval_every, config.checkpoint_every)
            )
            update = trainer.update(step, record=log)
            journal.note(update, config.tokens_per_step)
            stopping = asked.signal is not None
            if not (log or validate or save or stopping):
                continue
            bad = journal.look()  # the one place where the host waits for the device
            if bad is not None:
                raise stopped(trainer, step, bad, store.latest())
            trainer.recent.clear()
            if log:
                display.train(journal.train_record(step, learning_rate(config, step), update.loads))
            with journal.paused():
                if validate:
                    display.valid(journal.valid_record(step, trainer.validate(valid)))
                if save or stopping or (validate and journal.best_step == step):
                    save_run(store, step, trainer, journal, corpus)
    signal = asked.signal if step < config.steps else None
    return Summary.of(folder, config, journal, step, signal)
