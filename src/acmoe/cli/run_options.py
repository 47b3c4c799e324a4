"""Options that several commands on runs share: --threads, and --capacity with its old spelling."""

import logging
import warnings
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


def capacity_option(capacity: str | None, dropless: bool) -> str | None:
    """Return the text of --capacity, or `none` where --dropless is given in its place."""
    if not dropless:
        return capacity
    warnings.warn("--dropless is now --capacity none, the default", FutureWarning, stacklevel=2)
    return "none"
