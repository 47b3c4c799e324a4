"""Causal statistics: a token's cluster over the tokens of its sequence up to and including it."""

from acmoe.ops.statistics.prefix.reference import (
    PREFIX_MEASURES,
    PrefixMoments,
    check_prefix_measure,
    prefix_dispersion,
    segmented_sum,
)
from acmoe.ops.statistics.prefix.shrinking import Prior, shrunk

__all__ = [
    "PREFIX_MEASURES",
    "PrefixMoments",
    "Prior",
    "check_prefix_measure",
    "prefix_dispersion",
    "segmented_sum",
    "shrunk",
]
