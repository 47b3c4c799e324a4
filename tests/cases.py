"""Drawn token sets, and the mathematics of the paper as loops over clusters, features and tokens.

Nothing here shares a line with acmoe: these are the definitions, one number at a time, in float64.

B sequences of L tokens (or T tokens), D features, C clusters.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import Tensor

MEASURES = ("mad", "variance", "std", "gini", "iqr")


class TokenSet(NamedTuple):
    x: Tensor  # (T, D) or (B, L, D) float64
    assignment: Tensor  # (T,) or (B, L), -1 for a token in no cluster
    num_clusters: int
    token_mask: Tensor | None

    @property
    def counted(self) -> Tensor:
        """True where a token belongs to a cluster and is not padding."""
        inside = self.assignment >= 0
        return inside if self.token_mask is None else inside & self.token_mask


@st.composite
def token_sets(
    draw: st.DrawFn,
    *,
    ties: bool = True,
    sequences: bool = True,
    max_tokens: int = 12,
    clusters: Sequence[int] = (1, 2, 3, 7, 64),
) -> TokenSet:
    """Few tokens in few of the clusters, so that empty, single and full clusters all occur.

    With `ties` values lie on a coarse grid and whole features may be constant; without, no two
    values are equal, so that every measure has one gradient.
    """
    num_clusters = draw(st.sampled_from(clusters))
    dim = draw(st.integers(1, 4))
    shape: tuple[int, ...] = (draw(st.integers(0, max_tokens)),)
    if sequences and draw(st.booleans()):
        shape = (draw(st.integers(1, 3)), *shape)
    used = draw(st.lists(st.integers(-1, num_clusters - 1), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    assignment = torch.from_numpy(rng.choice(used, size=shape).astype(np.int64))
    mask = torch.from_numpy(rng.random(shape) < 0.7) if draw(st.booleans()) else None
    x = rng.normal(size=(*shape, dim)) * 10.0 ** draw(st.integers(-3, 3))
    if ties:
        x = rng.integers(-3, 4, size=(*shape, dim)) / 2
        x[..., rng.random(dim) < 0.3] = 0.1  # 0.1 * n / n is not 0.1 for every n
    return TokenSet(torch.from_numpy(x), assignment, num_clusters, mask)


def values_of(tokens: TokenSet, where: tuple[int, ...], cluster: int, feature: int) -> list[float]:
    """One feature of the tokens of one cluster; `where` is () or the number of the sequence."""
    rows = zip(tokens.x[where], tokens.assignment[where], tokens.counted[where], strict=True)
    return [row[feature].item() for row, own, counts in rows if counts and own == cluster]


def spread(values: Sequence[float], measure: str) -> float:
    """The dispersion of a handful of numbers; 0 for none."""
    n = len(values)
    if n == 0:
        return 0.0
    mean = math.fsum(values) / n
    if measure == "mad":
        return math.fsum(abs(v - mean) for v in values) / n
    if measure == "variance":
        return math.fsum((v - mean) ** 2 for v in values) / n
    if measure == "std":
        return math.sqrt(spread(values, "variance"))
    if measure == "gini":  # s of Theorem 1, rho the absolute difference
        return math.fsum(abs(v - w) for v in values for w in values) / n**2
    assert measure == "iqr"
    return quantile(values, 0.75) - quantile(values, 0.25)


def quantile(values: Sequence[float], share: float) -> float:
    """The value at place share * (n-1) of the sorted ones, on the line between its neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - (place - low)) + ordered[high] * (place - low)


def spread_gradient(values: Sequence[float], measure: str) -> list[float]:
    """d spread / d value_i, derived by hand; values are distinct."""
    n = len(values)
    mean = math.fsum(values) / n
    away = [v - mean for v in values]
    if measure == "mad":  # the mean moves by 1/n with every value
        signs = [np.sign(a) if n > 1 else 0.0 for a in away]
        return [(sign - sum(signs) / n) / n for sign in signs]
    if measure == "variance":  # sum of deviations is 0, so the mean's own movement drops out
        return [2 * a / n for a in away]
    if measure == "std":
        std = spread(values, "std")
        return [a / (n * std) if n > 1 else 0.0 for a in away]
    if measure == "gini":
        return [2 * sum(float(np.sign(v - w)) for w in values) / n**2 for v in values]
    assert measure == "iqr"
    ranks = [sum(w < v for w in values) for v in values]
    return [rank_weight(rank, n, 0.75) - rank_weight(rank, n, 0.25) for rank in ranks]


def rank_weight(rank: int, n: int, share: float) -> float:
    """Return the weight of this rank in the quantile: a hat of width one around its place."""
    return max(0.0, 1 - abs(share * (n - 1) - rank))


def loop_dispersion(
    tokens: TokenSet, of: Callable[[Sequence[float]], float]
) -> tuple[Tensor, Tensor]:
    """Dispersion (..., C, D) and count (..., C), one cluster and one feature at a time."""
    *sets, _, dim = tokens.x.shape
    result = torch.zeros(*sets, tokens.num_clusters, dim, dtype=torch.float64)
    count = torch.zeros(*sets, tokens.num_clusters)
    for where in np.ndindex(*sets):
        for cluster in range(tokens.num_clusters):
            for feature in range(dim):
                values = values_of(tokens, where, cluster, feature)
                result[(*where, cluster, feature)] = of(values)
                count[(*where, cluster)] = len(values)
    return result, count


def root_weights(s: Sequence[float], strength: float) -> list[float]:
    """Theorem 1 for one cluster, the root found by bracketing instead of Newton.

    In u = alpha + min(s), sum_q 1 / (s_q - min(s) + u) falls from at least d / lambda at
    u = lambda / d (the smallest term alone is that large) to at most d / lambda at u = lambda.
    """
    d, least = len(s), min(s)

    def excess(u: float) -> float:
        return strength / d * math.fsum(1 / (v - least + u) for v in s) - 1

    low, high = strength / d, strength
    exact = [u for u in (low, high) if abs(excess(u)) < 1e-15]
    u = exact[0] if exact else brentq(excess, low, high, xtol=1e-300, rtol=1e-15, maxiter=500)
    return [strength / d / (v - least + u) for v in s]


def loop_scale(
    dispersion: Tensor,
    count: Tensor,
    *,
    normalize: str = "cluster",
    strength: float | None = None,
    floor: float = 1e-3,
    eps: float = 0.0,
    clamp: float | None = None,
    min_tokens: int = 2,
) -> Tensor:
    """The diagonals of M from (C, D) dispersions, one weight at a time."""
    weights: dict[int, list[float]] = {}
    for cluster, row in enumerate(dispersion.tolist()):
        mean = math.fsum(row) / len(row)
        if count[cluster] < min_tokens or (mean == 0 and eps == 0):
            continue
        s = [max(v, floor * mean) + eps for v in row]
        if strength is None:
            weights[cluster] = [1 / v for v in s]
        else:
            weights[cluster] = [len(s) * w for w in root_weights(s, strength)]
    scale = torch.ones_like(dispersion)
    if not weights:
        return scale
    if clamp is not None:
        every = [w for row in weights.values() for w in row]
        highest = clamp * math.fsum(every) / len(every)
        weights = {cluster: [min(w, highest) for w in row] for cluster, row in weights.items()}
    for cluster, row in weights.items():
        for feature, weight in enumerate(row):
            peers = {
                "cluster": row,
                "feature": [other[feature] for other in weights.values()],
                "global": [w for other in weights.values() for w in other],
            }[normalize]
            scale[cluster, feature] = weight / (math.fsum(peers) / len(peers))
    return scale
