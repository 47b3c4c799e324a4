"""What the environment may ask of kernels. ACMOE_BACKEND, which chooses among them, is an op's:
ops/dispatch.py; ACMOE_TUNED, a table of block sizes, is theirs: ops/device/tuning.py."""

import os

from acmoe.errors import UserError


def gluon_wanted() -> str:
    """Kernels in Gluon where they have run (auto), where they compile too (try), or never."""
    return _one_of("ACMOE_GLUON", "auto", "try", "never")


def keeping_wanted() -> str:
    """Attention's weights kept for the backward where there is room (auto), or never."""
    return _one_of("ACMOE_KEEP_ATTENTION", "auto", "never")


def _one_of(name: str, *choices: str) -> str:
    wanted = os.environ.get(name, choices[0])
    if wanted not in choices:
        known = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise UserError(f"{name}={wanted!r} is unknown; choose {known}")
    return wanted
