"""Report the progress of a benchmark, since compiling a baseline can take a minute."""

from collections.abc import Callable, Mapping

from acmoe.lab.bench.harness.clock import Timing

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Print nothing."""


def tell_times(say: Say, subject: str, times: Mapping[str, Timing]) -> None:
    """Say the medians at once: a run that is stopped later has told what it measured."""
    told = (f"{name} {one.median:.4g} ms" for name, one in times.items())
    say(f"{subject}: " + ", ".join(told))
