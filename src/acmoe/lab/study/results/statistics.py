"""Statistics over seeds, for studies; they are computed in `acmoe.evaluate.seeds`."""

from acmoe.evaluate.seeds import (
    CONFIDENCE,
    DRAWS,
    EXACT_PAIRS,
    FEWEST_PAIRS,
    Difference,
    Spread,
    all_equal,
    holm,
    paired_difference,
    sign_flip_p,
)

__all__ = [
    "CONFIDENCE",
    "DRAWS",
    "EXACT_PAIRS",
    "FEWEST_PAIRS",
    "Difference",
    "Spread",
    "all_equal",
    "holm",
    "paired_difference",
    "sign_flip_p",
]
