"""The published gates in plain Python numbers: an independent loop that presets are compared with.

T tokens, K choices of each at the previous MoE layer, D features, C clusters, E experts.
"""

import math
from typing import NamedTuple

import torch

from acmoe import RoutingState


class Published(NamedTuple):
    eps: float
    clamp: float
    axis: str  # of the mean that weights are divided by: clusters, or everything
    before_clamp: bool = False  # that mean is taken before the clamp


PUBLISHED = {
    "reference-lm": Published(1e-4, 10.0, "clusters"),
    "reference-swin": Published(1e-4, 1.5, "everything", before_clamp=True),
    "reference-soft": Published(0.35, 5.0, "everything"),
}


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def published_weights(x, choices, constants):
    """Return (C, D) nested lists; `choices` are the (T, K) expert ids, the first choice first.

    C is the highest id among all choices, plus one. A token's cluster is its first choice.
    """
    dim, num_clusters = len(x[0]), 1 + max(max(ids) for ids in choices)
    weights = []
    for c in range(num_clusters):
        members = [row for row, ids in zip(x, choices, strict=True) if ids[0] == c]
        mad = [0.0] * dim
        if members:
            centre = [mean(row[q] for row in members) for q in range(dim)]
            mad = [mean(abs(row[q] - centre[q]) for row in members) for q in range(dim)]
        weights.append([1 / (value + constants.eps) for value in mad])
    limit = constants.clamp * mean(value for row in weights for value in row)
    clamped = [[min(value, limit) for value in row] for row in weights]
    averaged = weights if constants.before_clamp else clamped
    if constants.axis == "clusters":
        by = [mean(row[q] for row in averaged) for q in range(dim)]
    else:
        by = [mean(value for row in averaged for value in row)] * dim
    return [[value / by[q] for q, value in enumerate(row)] for row in clamped]


def published_gate(x, choices, embedding):
    """Return the two best experts of each token and their gates, as the published LM gate does."""
    scale = published_weights(x, choices, PUBLISHED["reference-lm"])
    lengths = [math.sqrt(math.fsum(v * v for v in row)) for row in embedding]
    found = []
    for row, ids in zip(x, choices, strict=True):
        scaled = [value * weight for value, weight in zip(row, scale[ids[0]], strict=True)]
        logits = [
            math.fsum(a * b for a, b in zip(scaled, e, strict=True)) / length
            for e, length in zip(embedding, lengths, strict=True)
        ]
        first, second = sorted(range(len(logits)), key=lambda k: -logits[k])[:2]
        share = 1 / (1 + math.exp(logits[second] - logits[first]))
        found.append(((first, second), (share, 1 - share)))
    return found


def clusters_state(choices, router, *, membership=None):
    """Return the state after a layer with these choices, whose first `router.mix` are clusters."""
    assignment = torch.tensor(choices)[:, : router.mix].contiguous()
    share = torch.ones(assignment.shape, dtype=torch.float64)
    share = share / share.sum(1, keepdim=True) if membership is None else membership
    scale = torch.zeros(router.num_experts, router.dim, dtype=torch.float64)
    scale[: 1 + max(max(ids) for ids in choices)] = 1.0
    return RoutingState(assignment, share, scale, torch.zeros(()))
