"""Where a figure was taken: the code, the versions, the device."""

import os

from acmoe.bench.results import environment
from acmoe.evaluate.device import pick_device

COMMIT = "ACMOE_COMMIT"  # names the commit where there is no checkout to ask


def surroundings(device: str, *, jobs: int) -> dict[str, str | int | None]:
    """`jobs` are the processes that shared the device: step times depend on it."""
    found = environment(pick_device(device))
    return {**found, "commit": os.environ.get(COMMIT) or found["commit"], "jobs": jobs}
