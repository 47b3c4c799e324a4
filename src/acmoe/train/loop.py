"""Training a language model; `Course.run` is the loop."""

from functools import partial
from pathlib import Path

from rich.console import Console

from acmoe.config.text.train import RunConfig
from acmoe.evaluate.language import check_vocabulary, metric_of
from acmoe.evaluate.run import CHECKPOINTS, open_corpus
from acmoe.runtime import pick_device, seeded
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.course import Course
from acmoe.train.display import Display
from acmoe.train.interrupt import Interrupts
from acmoe.train.journal import Journal
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
        course = Course(
            trainer=trainer,
            journal=journal,
            store=store,
            display=display,
            asked=asked,
            steps=config.steps,
            validate=partial(trainer.validate, valid),
            save=lambda step: save_run(store, step, trainer, journal, corpus),
        )
        step = course.run(resume_run(store, trainer, journal, corpus))
    return Summary.of(folder, config.steps, journal, step, course.signal_at(step))
