"""Does M's distance from the identity explain what a router does to the loss?

A block is the adaptive runs of one setting and one seed: same data, same first weights, and plain
runs of the same seed to subtract. Both quantities are taken relative to their block's mean, so that
neither an easy seed nor a hard setting counts, and the test shuffles within blocks alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from acmoe.lab.study.declared import Metric, Study
from acmoe.lab.study.summary import Group

DISTANCE = "scale_rms_log"  # a run that has no such figure has no M
DRAWS = 9_999

Array = NDArray[np.float64]


class Point(NamedTuple):
    """One adaptive run."""

    block: tuple[str, int]  # setting and size, seed
    distance: float  # rms of log M
    change: float  # percent of the plain run's figure


class ScaleEffect(NamedTuple):
    """How the change goes with the distance, among the routers of a seed."""

    runs: int
    blocks: int
    least: float  # distance
    most: float
    slope: float  # percent for each 0.1 of distance
    correlation: float
    p: float  # share of shuffles with a correlation at least as far from 0


def points_of(study: Study, group: Group) -> list[Point]:
    """The group's adaptive runs in its primary metric, each against the plain run of its seed."""
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
            if base[seed]:
                change = 100 * (figures[seed] - base[seed]) / base[seed]
                found.append(Point((group.title, seed), distances[seed], change))
    return found


def plain_of(study: Study, group: Group, condition: str) -> str | None:
    """The first without M along the comparisons the study declares; None where there is none."""
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
    """None where no block has two runs, or all of a block's have one distance or one figure."""
    blocks: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        blocks.setdefault(point.block, []).append(point)
    several = [block for block in blocks.values() if len(block) > 1]
    if not several:
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
    """Of a seeded sample of shuffles, to which the observed order is added."""
    generator = np.random.default_rng(0)
    drawn = [generator.permuted(np.tile(block, (DRAWS, 1)), axis=1) for block in distance]
    products = np.abs(np.concatenate(drawn, axis=1) @ change)
    # Orders that are equal in exact arithmetic differ by rounding.
    extreme = int((products >= abs(product) - 1e-12 * size).sum())
    return (extreme + 1) / (DRAWS + 1)
