"""What a routing looks like: how evenly experts are used, how stable clusters are across layers.

E experts of a layer, C clusters of the layer before.
"""

from typing import NamedTuple

from torch import Tensor


def load_balance(load_E: Tensor) -> float:
    """Standard deviation over experts of their share of the routed tokens, in percent points.

    0 is perfect balance. Takes `load`, the tokens sent to each expert.
    """
    total = float(load_E.sum())
    if total == 0:
        return 0.0
    return float((load_E.double() * (100 / total)).std(correction=0))


class Instability(NamedTuple):
    """How much two clusterings of the same tokens disagree."""

    instability: float  # share of token pairs together in one layer and apart in the other
    chance: float  # what it would be were the second layer's clusters dealt out at random
    adjusted_rand: float  # 1: the same clusters; 0: as unlike as chance


def instability(table_CE: Tensor) -> Instability:
    """1 - Rand index of two clusterings, from their contingency table.

    `table_CE[c, e]` counts the tokens of cluster c in one layer and e in the next. The paper takes
    the mean over an n x n matrix whose diagonal is always 0; here the n (n - 1) / 2 real pairs
    count, which is n / (n - 1) times as much.
    """
    # Integers of Python: the square of a corpus' length does not fit a float's 53 bits.
    rows = [[int(count) for count in row] for row in table_CE.tolist()]
    total = _pairs(sum(map(sum, rows)))
    both = sum(_pairs(count) for row in rows for count in row)
    first = sum(_pairs(sum(row)) for row in rows)
    second = sum(_pairs(sum(column)) for column in zip(*rows, strict=True))
    if total == 0:
        return Instability(0.0, 0.0, 1.0)
    expected = first * second / total  # pairs together in both, under random relabelling
    most = (first + second) / 2 - expected
    return Instability(
        (first + second - 2 * both) / total,
        (first + second - 2 * expected) / total,
        (both - expected) / most if most else 1.0,  # all in one cluster, or each alone: no choice
    )


def _pairs(count: int) -> int:
    return count * (count - 1) // 2
