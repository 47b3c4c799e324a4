"""Find what Triton's launcher passes on to the driver, so that a tape can call the driver itself.

The launcher of a compiled kernel is written in Python. Each call of it defines functions, asks for
scratch memory if the kernel needs any, and copies the arguments; then it calls its attribute
`launch`. The order of the arguments of `launch` differs between versions of Triton, so it is found
by a trial: a copy of the launcher is called with a `Mark` for each argument, and with a `launch`
that keeps what it receives. A launcher that does more with its arguments than pass them on is
called as it is.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

NUM_FIRST = 6  # grid (3), stream, function, metadata; then come three hooks, and the kernel's


class Mark:
    """Stands for an argument in a trial: the first NUM_FIRST places, then those of the kernel.

    It is no number, so that a launcher that computes with it raises.
    """

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


class Passed(NamedTuple):
    """The function that a launcher calls, and the arguments: constants, `Mark`s, tuples of them."""

    launch: Callable[..., Any]
    arguments: tuple[Any, ...]


def passed_on(run: Any, num_values: int) -> Passed | None:
    """Return what a launcher passes on for a kernel with `num_values` arguments; None: unknown."""
    if not callable(getattr(run, "launch", None)):
        return None
    marks = [Mark(place) for place in range(NUM_FIRST + num_values)]
    noted: list[tuple[Any, ...]] = []
    try:
        trial = copy.copy(run)
        trial.launch = lambda *arguments: noted.append(arguments)
        trial(*marks[:NUM_FIRST], None, None, None, *marks[NUM_FIRST:])
        constants = [None, *vars(run).values()]
    except Exception:  # a launcher that reads a value, say to allocate scratch memory
        return None
    if len(noted) != 1:
        return None
    values = tuple(marks[NUM_FIRST:])
    seen: list[Mark] = []
    for one in noted[0]:
        if type(one) is Mark:
            seen.append(one)
        elif type(one) is tuple and one == values:
            seen += values
        elif not any(one is constant for constant in constants):
            return None
    return Passed(run.launch, noted[0]) if seen == marks else None
