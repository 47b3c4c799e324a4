"""Measure how evenly tokens are distributed over experts.

N tokens, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor

from acmoe.evaluate.measures import load_balance
from acmoe.ops.route.reference import load

STARVED = 0.1  # an expert is starved below this fraction of the even share


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load of the experts of one layer."""

    share: tuple[float, ...]  # percentage of the routed rows at each expert
    std: float  # standard deviation of `share`, in percentage points; 0 is perfect balance
    dead: tuple[int, ...]  # experts that no token chose
    starved: tuple[int, ...]  # experts below a tenth of the even share, including dead ones
    entropy: float  # entropy of the shares in bits; log2(E) is perfect balance


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Summary of one measure over the layers of a model."""

    mean: float
    std: float
    least: float
    greatest: float


def measure_load(expert_ids_NK: Tensor, num_experts: int) -> Load:
    """Measure the load from the chosen experts. The id E means "no expert" and is not counted."""
    load_E = load(expert_ids_NK, num_experts).double()
    share_E = load_E / load_E.sum().clamp(min=1)
    return Load(
        share=tuple((100 * share_E).tolist()),
        std=load_balance(load_E),
        dead=tuple((load_E == 0).nonzero()[:, 0].tolist()),
        starved=tuple((share_E < STARVED / num_experts).nonzero()[:, 0].tolist()),
        entropy=float(entropy_bits(share_E)),
    )


def entropy_bits(probability_E: Tensor) -> Tensor:
    """Return -sum p log2 p over the last axis, with 0 log 0 = 0."""
    nats: Tensor = torch.special.entr(probability_E).sum(-1)
    return nats / math.log(2)


def gate_entropy(affinity_NE: Tensor) -> float:
    """Return the mean over tokens of the entropy of the softmax over all experts, in bits.

    0 means that every token is certain of its expert, log2(E) that all experts are equally likely.
    """
    return float(entropy_bits(affinity_NE.double().softmax(-1)).mean())


def over_layers(values: Sequence[float]) -> Spread:
    return Spread(mean=fmean(values), std=pstdev(values), least=min(values), greatest=max(values))
