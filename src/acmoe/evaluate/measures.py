"""Measures of routing: load balance over experts, and stability of clusters across layers.

E experts of a layer, C clusters of the previous layer.
"""

from typing import NamedTuple

from torch import Tensor


def load_balance(load_E: Tensor) -> float:
    """Return the standard deviation of the experts' shares of tokens, in percentage points.

    `load_E` holds the number of tokens sent to each expert. 0 is perfect balance.
    """
    total = float(load_E.sum())
    if total == 0:
        return 0.0
    return float((load_E.cpu().double() * (100 / total)).std(correction=0))


class Instability(NamedTuple):
    """Disagreement of two clusterings of the same tokens."""

    instability: float  # fraction of token pairs together in one layer and apart in the other
    chance: float  # expected instability for random clusters of the same sizes
    adjusted_rand: float  # 1: the same clusters; 0: agreement of random clusters


def instability(table_CE: Tensor) -> Instability:
    """Compute 1 - Rand index of two clusterings from their contingency table.

    `table_CE[c, e]` counts the tokens in cluster c of one layer and cluster e of the next. The
    paper takes the mean over an n x n matrix whose diagonal is always 0; here it is taken over the
    n (n - 1) / 2 pairs of different tokens, which gives n / (n - 1) times the paper's value.
    """
    # Python integers: the squared length of a corpus does not fit the 53 bits of a float.
    rows = [[int(count) for count in row] for row in table_CE.tolist()]
    total = _pairs(sum(map(sum, rows)))
    both = sum(_pairs(count) for row in rows for count in row)
    first = sum(_pairs(sum(row)) for row in rows)
    second = sum(_pairs(sum(column)) for column in zip(*rows, strict=True))
    if total == 0:
        return Instability(0.0, 0.0, 1.0)
    expected = first * second / total  # pairs together in both, for random clusters
    most = (first + second) / 2 - expected
    return Instability(
        (first + second - 2 * both) / total,
        (first + second - 2 * expected) / total,
        (both - expected) / most if most else 1.0,  # both have one cluster, or only singletons
    )


def _pairs(count: int) -> int:
    return count * (count - 1) // 2
