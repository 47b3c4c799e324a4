"""Ask whether an option is in the environment, at little cost of the host's time.

acmoe/config/environment.py has the options and their values.
"""

import os
from typing import Any

# The dictionary inside `os.environ`, whose names and values are encoded.
STORED: Any = getattr(os.environ, "_data", os.environ)
_encoded: Any = getattr(os.environ, "encodekey", str) if STORED is not os.environ else str
_NAMES = {name: _encoded(name) for name in ("ACMOE_BACKEND", "ACMOE_GLUON", "TRITON_INTERPRET")}
INTERPRET, BACKEND = _NAMES["TRITON_INTERPRET"], _NAMES["ACMOE_BACKEND"]  # their names in STORED


def is_set(name: str) -> bool:
    """Return True if ACMOE_BACKEND, ACMOE_GLUON or TRITON_INTERPRET is set.

    Eager calls ask several times. `os.environ` encodes the name, raises a KeyError and catches it,
    which takes 1.5 us; its dictionary answers in 0.1.
    """
    return _NAMES[name] in STORED
