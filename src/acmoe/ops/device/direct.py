"""Find what Triton's launcher passes on to the driver, so that a tape can call the driver itself.

The launcher of a compiled kernel is written in Python. Each call of it defines functions, asks for
scratch memory if the kernel needs any, and copies the arguments; then it calls its attribute
`launch`. The order of the arguments of `launch` differs between versions of Triton, so it is found
by a trial: a copy of the launcher is called with a `Mark` for each argument, and with a `launch`
that keeps what it receives. A launcher that does more with its arguments than pass them on is
called as it is.

For a kernel with TMA descriptors, `launch` is a Python function too. In each call it encodes every
descriptor for the driver. `encoded` finds by a trial which arguments these are, so that a tape can
keep the code of an address.
"""

import copy
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

# Arguments of a launcher before its three hooks: grid (3), stream, function, metadata. The kernel's
# arguments follow the hooks.
NUM_FIRST = 6


class Mark:
    """A placeholder for an argument in a trial: the NUM_FIRST first ones, then the kernel's.

    A mark is no number, so a launcher that computes with one raises an error.
    """

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


class Encoding(NamedTuple):
    """A placeholder for what encode(descriptor, metadata) returns for the descriptor at `place`."""

    place: int
    encode: Callable[[Any, Any], Sequence[Any]]
    metadata: Any


class Passed(NamedTuple):
    """The call that a launcher makes: the function, and its arguments.

    An argument is a constant, a `Mark` for an argument of the launcher, or a tuple of both.
    """

    launch: Callable[..., Any]
    arguments: tuple[Any, ...]


def passed_on(run: Any, num_values: int) -> Passed | None:
    """Return the call that a launcher makes for a kernel with `num_values` arguments, or None.

    None: a trial does not show it.
    """
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


def encoded(launch: Any, num_arguments: int) -> Passed | None:
    """Return what a `launch` that encodes TMA descriptors passes on to the driver; None: unknown.

    The arguments are `Mark`s, whose places are those among the arguments of `launch`, and an
    `Encoding` for each descriptor. Triton 3.6 has such a function (`wrap_handle_tensordesc`).
    """
    marks = [Mark(place) for place in range(num_arguments)]
    noted: list[tuple[Any, ...]] = []
    try:
        cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
        driver = cells["launcher"].cell_contents
        cells["launcher"] = CellType(lambda *arguments: noted.append(arguments))
        encode = launch.__globals__["make_tensordesc_arg"]
        names = {
            **launch.__globals__,
            "make_tensordesc_arg": lambda one, metadata: [(one, metadata)],
        }
        FunctionType(launch.__code__, names, None, None, tuple(cells.values()))(*marks)
        (arguments,) = noted
        found = [
            Encoding(one[0].place, encode, one[1]) if type(one) is tuple else one
            for one in arguments
        ]
        places = [one.place for one in found]
    except Exception:  # another version of Triton
        return None
    return Passed(driver, tuple(found)) if places == list(range(num_arguments)) else None
