"""JSON that every parser reads: NaN and infinity, which JSON lacks, become null."""

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """Return the JSON of a value, with null for numbers that are not finite."""
    return json.dumps(finite_or_null(value), indent=indent, allow_nan=False)


def finite_or_null(value: Any) -> Any:
    """Replace NaN and infinity by None, in mappings and lists too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value
