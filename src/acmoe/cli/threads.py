"""The option --threads: choose the number of CPU threads for the model of a command."""

import logging
from pathlib import Path


def run_threads(requested: int | None, folder: Path, device: str) -> None:
    """Set the threads of a command that reads the run in `folder`; log the choice."""
    from acmoe.config.images.train import VISION_RUNS
    from acmoe.evaluate.run import open_run, open_vision_run, run_kind
    from acmoe.train.threads import choose_threads, use_threads

    opened = open_vision_run if run_kind(folder) in VISION_RUNS else open_run
    threads = choose_threads(requested, opened(folder).config.model, device=device)
    use_threads(threads)
    logging.getLogger("acmoe").info(threads.message)
