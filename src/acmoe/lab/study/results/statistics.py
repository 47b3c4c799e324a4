"""The old place of `paired_difference`, `holm` and the like (0.1), now in acmoe.evaluate.seeds."""

import warnings
from typing import Any

from acmoe.evaluate import seeds

_MOVED = (
    *("CONFIDENCE", "DRAWS", "EXACT_PAIRS", "FEWEST_PAIRS", "Difference", "Spread"),
    *("all_equal", "holm", "paired_difference", "sign_flip_p"),
)


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} is now acmoe.evaluate.seeds.{name}; the old place goes with version "
        "0.3",
        FutureWarning,
        stacklevel=2,
    )
    return getattr(seeds, name)
