"""The environment of a figure: commit, versions and device."""

from acmoe.lab.bench.harness.results import environment
from acmoe.runtime import pick_device


def study_environment(device: str, *, jobs: int) -> dict[str, str | int | None]:
    """Return the environment; `jobs` processes share the device, and step times depend on that."""
    return {**environment(pick_device(device)), "jobs": jobs}
