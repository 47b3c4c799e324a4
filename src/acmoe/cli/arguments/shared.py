"""Options of many commands, each with its text on the help page."""

from typing import Annotated

import tyro

Device = Annotated[str, tyro.conf.arg(help="Device to run on; auto takes a GPU if there is one.")]
Json = Annotated[bool, tyro.conf.arg(help="Print the result as JSON.")]
TrainThreads = Annotated[
    int | None,
    tyro.conf.arg(
        help="Number of CPU threads. If not given: OMP_NUM_THREADS, else the number that a "
        "continued run was saved with, else 1 for small models and torch's default for others."
    ),
]
