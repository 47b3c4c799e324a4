"""Correlate the distance of M from the identity with a router's change of the loss.

A block is the adaptive runs of one setting and one seed: they have the same data and the same
initial weights, and a plain run of the same seed to compare with. Both quantities are centred
within their block, so that differences between seeds and settings have no effect, and the
permutation test shuffles only within blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from acmoe.lab.study.results.summary import Group
from acmoe.lab.study.study import Metric, Study

DISTANCE = "scale_rms_log"  # only runs with adaptive layers have this metric
DRAWS = 9_999

Array = NDArray[np.float64]


class Point(NamedTuple):
    """One adaptive run."""

    block: tuple[str, int]  # setting and size, seed
    distance: float  # rms of log M
    change: float  # difference to the plain run, in percent


class ScaleEffect(NamedTuple):
    """Slope and correlation of change against distance, within blocks."""

    runs: int
    blocks: int
    least: float  # smallest distance
    most: float  # largest distance
    slope: float  # percent per 0.1 of distance
    correlation: float
    p: float  # share of permutations with a correlation at least as far from 0


def points_of(study: Study, group: Group) -> list[Point]:
    """Return the group's adaptive runs, each compared with the plain run of its seed."""
    metric = next((one for one in study.primary if one.is_of(group.setting)), None)
    return [] if metric is None else _points(study, group, metric)


def _points(study: Study, group: Group, metric: Metric) -> list[Point]:
    found = []
    for condition in group.conditions:
        distances = group.by_seed(condition, DISTANCE)
        plain = plain_of(study, group, condition)
        if not distances or plain is None:
            continue
        figures, base = (group.by_seed(name, metric.key) for name in (condition, plain))
        for seed in sorted(distances.keys() & figures.keys() & base.keys()):
            # A run that ends with M = I had another M before: its distance tells nothing.
            if base[seed] and distances[seed] > 0:
                change = 100 * (figures[seed] - base[seed]) / base[seed]
                found.append(Point((group.title, seed), distances[seed], change))
    return found


def plain_of(study: Study, group: Group, condition: str) -> str | None:
    """Follow the study's baselines to the first condition without M; None where there is none."""
    baselines: dict[str, str] = {}
    for name, baseline in study.comparisons:
        baselines.setdefault(name, baseline)
    seen: set[str] = set()
    while condition in baselines and condition not in seen:
        seen.add(condition)
        condition = baselines[condition]
        if not group.by_seed(condition, DISTANCE):
            return condition
    return None


def scale_effect(points: Sequence[Point]) -> ScaleEffect | None:
    """Compute the effect; None where distance or change never varies within a block.

    Also None with a single block of two runs, whose correlation is 1 or -1 whatever they are.
    """
    blocks: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        blocks.setdefault(point.block, []).append(point)
    several = [block for block in blocks.values() if len(block) > 1]
    if sum(len(block) - 1 for block in several) < 2:
        return None
    distance = [_centred([point.distance for point in block]) for block in several]
    change = np.concatenate([_centred([point.change for point in block]) for block in several])
    seen = np.concatenate(distance)
    size = float(np.sqrt((seen**2).sum() * (change**2).sum()))
    if size == 0:
        return None
    product = float(seen @ change)
    shown = [point.distance for block in several for point in block]
    return ScaleEffect(
        runs=len(shown),
        blocks=len(several),
        least=min(shown),
        most=max(shown),
        slope=0.1 * product / float(seen @ seen),
        correlation=product / size,
        p=_shuffled_p(distance, change, product, size),
    )


def _centred(values: Sequence[float]) -> Array:
    array: Array = np.asarray(values, dtype=np.float64)
    return array - float(array.mean())


def _shuffled_p(distance: Sequence[Array], change: Array, product: float, size: float) -> float:
    """Return the p value of a seeded sample of permutations, with the observed one added."""
    generator = np.random.default_rng(0)
    drawn = [generator.permuted(np.tile(block, (DRAWS, 1)), axis=1) for block in distance]
    products = np.abs(np.concatenate(drawn, axis=1) @ change)
    # Permutations that are equal in exact arithmetic differ by rounding.
    extreme = int((products >= abs(product) - 1e-12 * size).sum())
    return (extreme + 1) / (DRAWS + 1)
