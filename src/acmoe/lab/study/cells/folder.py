"""The folder a cell trains in: temporary, or found again by a cell that continues."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acmoe.lab.study.cell import Cell


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
    if not saves(cell.config):
        with tempfile.TemporaryDirectory(prefix="acmoe-study-", dir=scratch) as folder:
            yield Path(folder)
        return
    kept = Path(scratch or tempfile.gettempdir()) / f"acmoe-study-{cell.digest}"
    kept.mkdir(parents=True, exist_ok=True)
    yield kept
    shutil.rmtree(kept)
