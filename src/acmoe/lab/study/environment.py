"""Where a figure was taken: the code, the versions, the device."""

from acmoe.lab.bench.results import environment
from acmoe.runtime import pick_device


def surroundings(device: str, *, jobs: int) -> dict[str, str | int | None]:
    """`jobs` are the processes that shared the device: step times depend on it."""
    return {**environment(pick_device(device)), "jobs": jobs}
