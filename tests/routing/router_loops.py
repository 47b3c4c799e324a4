"""The routers of the paper as float64 loops over scalars, written apart from the library.

Every number is a torch scalar, so autograd differentiates the loop too, and a router's gradients
can be held against it.

T tokens, D features, E experts, C clusters, K experts per token.
"""

import math

import torch
from scipy.optimize import brentq
from torch import Tensor

Rows = list[list[Tensor]]


def rows(value: Tensor) -> Rows:
    """A matrix as lists of scalars."""
    return [list(row.unbind()) for row in value.unbind()]


def matrix(values: Rows) -> Tensor:
    return torch.stack([torch.stack(row) for row in values])


def dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return sum((p * q for p, q in zip(a, b, strict=True)), torch.tensor(0.0, dtype=torch.float64))


def softmax(values: list[Tensor]) -> list[Tensor]:
    greatest = max(value.item() for value in values)
    powers = [(value - greatest).exp() for value in values]
    return [power / sum(powers) for power in powers]


def best_first(values: list[Tensor]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i].item())


def top_k_gate(affinity: Rows, top_k: int, over: str) -> tuple[list[list[int]], Rows]:
    """Chosen experts and their gate: softmax over the chosen ("selected") or over all E ("all")."""
    chosen, gates = [], []
    for row in affinity:
        ids = best_first(row)[:top_k]
        chosen.append(ids)
        if over == "selected":
            gates.append(softmax([row[i] for i in ids]))
        else:
            every = softmax(row)
            gates.append([every[i] for i in ids])
    return chosen, gates


def spread(values: list[Tensor], measure: str) -> Tensor:
    """Return how far the numbers lie apart, by the textbook formula of each measure."""
    n = len(values)
    mean = sum(values) / n
    if measure == "mad":
        return sum((value - mean).abs() for value in values) / n
    if measure == "variance":
        return sum((value - mean) ** 2 for value in values) / n
    if measure == "std":
        return (sum((value - mean) ** 2 for value in values) / n).sqrt()
    if measure == "gini":
        return sum((a - b).abs() for a in values for b in values) / n**2
    ordered = sorted(values, key=lambda value: value.item())

    def quantile(share: float) -> Tensor:
        place = share * (n - 1)
        low = math.floor(place)
        high = min(low + 1, n - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return quantile(0.75) - quantile(0.25)


def dispersion(x: Rows, cluster: list[int], num_clusters: int, measure: str = "mad") -> list:
    """For each cluster its spread along every feature; None where fewer than two tokens stand."""
    found: list[list[Tensor] | None] = []
    for c in range(num_clusters):
        members = [row for row, own in zip(x, cluster, strict=True) if own == c]
        if len(members) < 2:
            found.append(None)
            continue
        found.append([spread([row[q] for row in members], measure) for q in range(len(x[0]))])
    return found


def theorem_weights(s: list[Tensor], strength: float) -> list[Tensor]:
    """d times the weights of Theorem 1: (lambda / d) / (s + alpha), alpha by bisection."""
    numbers = [value.item() for value in s]
    d = len(numbers)

    def excess(shift: float) -> float:  # alpha = shift - min(s); the largest root has shift > 0
        return sum(strength / d / (value - min(numbers) + shift) for value in numbers) - 1

    # At shift = lambda / d the tightest feature alone weighs 1; at lambda all weigh at most 1/d.
    at_least, at_most = strength / d, strength
    shift = at_least if d == 1 else brentq(excess, at_least * 0.999, at_most * 1.001, xtol=1e-15)
    return [value.new_tensor(strength / (value.item() - min(numbers) + shift)) for value in s]


def scales(
    spreads: list,
    dim: int,
    *,
    normalize: str = "cluster",
    strength: float | None = None,
    floor: float = 1e-3,
) -> Rows:
    """M of every cluster from its spreads; ones where a cluster has none."""
    weights: dict[int, list[Tensor]] = {}
    for c, s in enumerate(spreads):
        if s is not None:
            least = floor * sum(s) / dim
            s = [torch.maximum(value, least) for value in s]
            one_over = [1 / value for value in s]
            weights[c] = one_over if strength is None else theorem_weights(s, strength)
    result = [[torch.tensor(1.0, dtype=torch.float64)] * dim for _ in spreads]
    for c, w in weights.items():
        others = weights.values()
        if normalize == "cluster":
            mean = [sum(w) / dim] * dim
        elif normalize == "global":
            mean = [sum(sum(other) for other in others) / (dim * len(others))] * dim
        else:
            mean = [sum(other[q] for other in others) / len(others) for q in range(dim)]
        result[c] = [value / by for value, by in zip(w, mean, strict=True)]
    return result


def rescaled(x: Rows, scale: Rows, clusters: list[list[int]], membership: Rows) -> Rows:
    """Each token times the scale of its clusters, weighted by membership; cluster -1 has M = I."""
    result = []
    for row, own, share in zip(x, clusters, membership, strict=True):
        factor = []
        for q in range(len(row)):
            parts = [
                weight * (scale[c][q] if c >= 0 else 1.0)
                for c, weight in zip(own, share, strict=True)
            ]
            factor.append(sum(parts))
        result.append([value * times for value, times in zip(row, factor, strict=True)])
    return result
