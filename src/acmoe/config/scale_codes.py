"""Small whole numbers that say what a layer computes for the next router, and how it measures.

A layer writes them into the routing state that it hands on, and the router that reads the state
compares them with its own (routing/origin.py).
"""

import zlib
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

# A layer computes one of these for the next router: nothing, clusters, clusters and their scales.
NOTHING, CLUSTERS, SCALES = range(3)

MODES = ("batch", "running", "prefix", "sequence")
MEASURES = ("mad", "variance", "std", "gini", "iqr")
NORMALIZATIONS = ("cluster", "feature", "global")

# The fields with a number of their own, in order; the last number stands for all other fields.
CODED: Mapping[str, tuple[str, ...]] = {
    "measure": MEASURES,
    "normalize": NORMALIZATIONS,
    "statistics": MODES,
    "eval_statistics": MODES,
}


def scale_codes(config: Any) -> tuple[int, ...]:
    """Return numbers that are equal for two adaptive configs if both measure the same scales.

    One number for each field of `CODED`, its place among the choices; then 16 bits of a checksum
    over the other fields that enter the scale. Different values of those have equal checksums in
    one of 65,536 cases.
    """
    train, evaluation = config.modes
    chosen = (config.measure, config.normalize, train, evaluation)
    places = [choices.index(value) for choices, value in zip(CODED.values(), chosen, strict=True)]
    return (*places, zlib.crc32(repr(other_options(config)).encode()) & 0xFFFF)


def other_options(config: Any) -> dict[str, Any]:
    """Return the remaining fields that enter the scale, where they differ from their defaults."""
    left_out = {*CODED, *config.outside_scale}
    if "running" not in config.modes:
        left_out.add("momentum")
    return {
        one.name: float(value) if isinstance(value, Real) else value
        for one in sorted(fields(config), key=lambda one: one.name)
        if one.name not in left_out and (value := getattr(config, one.name)) != one.default
    }
