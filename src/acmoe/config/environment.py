"""Options read from the environment.

Two more are read elsewhere: ACMOE_BACKEND, which chooses among kernels (ops/dispatch.py), and
ACMOE_TUNED, a table of block sizes (ops/experts/settings/tables.py).
"""

import os

from acmoe.errors import UserError


def gluon_requested() -> str:
    """ACMOE_GLUON: when to use kernels written in Gluon.

    auto   with versions of Triton with which they have been run
    try    also with versions with which they have only been compiled
    never  not at all
    """
    return _one_of("ACMOE_GLUON", "auto", "try", "never")


def tuning_requested() -> str:
    """ACMOE_TUNE: time a few settings of the expert kernels at the first use of a layer on a GPU.

    auto   where no table names the layer and tuning is safe (ops/experts/tune/first_use.py)
    cached use what was measured before, and measure nothing
    never  neither; the table and the rules of the package serve
    """
    return _one_of("ACMOE_TUNE", "auto", "cached", "never")


def saving_requested() -> str:
    """ACMOE_KEEP_ATTENTION: save attention weights for backward where they fit (auto), or never."""
    return _one_of("ACMOE_KEEP_ATTENTION", "auto", "never")


def router_saving_requested() -> str:
    """ACMOE_KEEP_ROUTER: save the rescaled tokens of many experts for backward (auto), or never."""
    return _one_of("ACMOE_KEEP_ROUTER", "auto", "never")


def native_requested() -> str:
    """ACMOE_NATIVE: compile the C kernels of small calls on a CPU where they serve, or never."""
    return _one_of("ACMOE_NATIVE", "auto", "never")


def fast_requested() -> str:
    """ACMOE_FAST: models run on their fast path where it computes the same (auto), or never."""
    return _one_of("ACMOE_FAST", "auto", "never")


def _one_of(name: str, *choices: str) -> str:
    wanted = os.environ.get(name, choices[0])
    if wanted not in choices:
        known = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise UserError(f"{name}={wanted!r} is unknown; choose {known}")
    return wanted
