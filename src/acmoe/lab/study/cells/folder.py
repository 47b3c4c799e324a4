"""The folder a cell trains in: temporary, or found again by a cell that continues."""

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acmoe.lab.study.cell import Cell
from acmoe.storage.atomic import report_write_errors


def saves(config: Any) -> bool:
    """Return True where the run writes checkpoints before its last update."""
    steps, every = getattr(config, "steps", None), getattr(config, "checkpoint_every", None)
    return isinstance(steps, int) and isinstance(every, int) and every < steps


@contextlib.contextmanager
def cell_folder(cell: Cell, scratch: Path | None) -> Iterator[Path]:
    """Make the cell's folder in `scratch`, or in the system's temporary folder.

    A cell that saves checkpoints has the folder acmoe-study-DIGEST: the folder of a killed or
    failed run stays, and the next run of the cell continues there. All other folders are removed.
    """
    place = Path(scratch or tempfile.gettempdir())
    if not saves(cell.config):
        with report_write_errors(place):
            temporary = tempfile.TemporaryDirectory(
                prefix="acmoe-study-", dir=place, ignore_cleanup_errors=True
            )
        with temporary as folder:
            yield Path(folder)
        if Path(folder).exists():
            warnings.warn(f"cannot remove all of {folder}; remove it", stacklevel=1)
        return
    kept = place / f"acmoe-study-{cell.digest}"
    done = kept.with_name(f".{kept.name}.done")
    with report_write_errors(kept):
        # A process that was killed while it removed its folder leaves this one.
        shutil.rmtree(done, ignore_errors=True)
        kept.mkdir(parents=True, exist_ok=True)
    yield kept
    with report_write_errors(kept):
        os.replace(kept, done)  # half removed, it would be no run folder to continue in
    try:
        shutil.rmtree(done)
    except OSError as error:  # the result of the cell is worth more than the space
        warnings.warn(f"cannot remove {done}: {error.strerror}; remove it", stacklevel=1)
