"""How evenly experts are used.

N tokens, E experts, K experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor

from acmoe.evaluate.measures import load_balance
from acmoe.routing.losses import load

STARVED = 0.1  # of the even share


@dataclass(frozen=True, kw_only=True)
class Load:
    """One layer."""

    share: tuple[float, ...]  # percent of the routed rows at each expert
    std: float  # of those, in points; 0: balance
    dead: tuple[int, ...]  # experts that no token chose
    starved: tuple[int, ...]  # experts below a tenth of the even share, dead ones among them
    entropy: float  # of the shares, in bits; log2(E): balance


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the layers of a model."""

    mean: float
    std: float
    least: float
    greatest: float


def measure_load(expert_ids_NK: Tensor, num_experts: int) -> Load:
    """Of the choices made; an id E, "no expert", counts nowhere."""
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
    """-sum p log2 p over the last axis, 0 log 0 being 0."""
    nats: Tensor = torch.special.entr(probability_E).sum(-1)
    return nats / math.log(2)


def gate_entropy(affinity_NE: Tensor) -> float:
    """Mean entropy of a token's softmax over all experts, in bits: 0 sure, log2(E) undecided."""
    return float(entropy_bits(affinity_NE.double().softmax(-1)).mean())


def over_layers(values: Sequence[float]) -> Spread:
    return Spread(mean=fmean(values), std=pstdev(values), least=min(values), greatest=max(values))
