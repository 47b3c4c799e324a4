"""Routing counts, accumulated over an evaluation, and the measures computed from them.

T tokens, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.evaluate.measures import instability, load_balance
from acmoe.ops.route.reference import load
from acmoe.routing.state import Routing, first_choice


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Routing measures of one MoE layer.

    The first layer has no previous one to compare with, so its instability is None.
    """

    load: tuple[float, ...]  # percent of the routed tokens sent to each expert
    load_balance: float  # standard deviation of those
    instability: float | None = None
    chance: float | None = None  # expected instability of random clusters of the same sizes
    adjusted_rand: float | None = None


class RoutingTally:
    """Counts tokens per expert, and per pair of first experts in consecutive MoE layers."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.num_experts = num_experts
        size = (num_layers, num_experts)
        self.loads = torch.zeros(size, dtype=torch.int64, device=device)
        self.tables = torch.zeros((*size, num_experts), dtype=torch.int64, device=device)

    def add(self, routings: Sequence[Routing], token_mask: Tensor | None) -> None:
        """Add the routings of one forward pass, one per MoE layer."""
        mask_T = None if token_mask is None else token_mask.flatten()
        previous_T: Tensor | None = None
        for depth, routing in enumerate(routings):
            self.loads[depth] += load(routing.expert_ids, self.num_experts, mask_T).long()
            first_T = first_choice(routing)
            if previous_T is not None:
                pair_T = previous_T * self.num_experts + first_T
                pair_T = pair_T if mask_T is None else pair_T[mask_T]
                # Not bincount: it makes the host wait for a GPU, in every layer.
                counts = load(pair_T[:, None], self.num_experts**2)
                self.tables[depth] += counts.long().view(self.num_experts, -1)
            previous_T = first_T

    def layers(self, ranks: Ranks = ALONE) -> tuple[LayerReport, ...]:
        """Compute the measures of each layer, from the counts of all processes together."""
        found = []
        loads, tables = ranks.sum(self.loads).cpu().double(), ranks.sum(self.tables)
        for depth, (load_E, table_EE) in enumerate(zip(loads, tables, strict=True)):
            share_E = 100 * load_E / load_E.sum().clamp(min=1)
            balance = load_balance(load_E)
            if depth == 0:
                found.append(LayerReport(load=tuple(share_E.tolist()), load_balance=balance))
                continue
            change = instability(table_EE)
            found.append(
                LayerReport(
                    load=tuple(share_E.tolist()),
                    load_balance=balance,
                    instability=change.instability,
                    chance=change.chance,
                    adjusted_rand=change.adjusted_rand,
                )
            )
        return tuple(found)


class StageTally:
    """Routing counts of models whose tokens change between stages, such as Swin.

    Clusters of consecutive layers are compared only within a stage, where the tokens are the same.
    """

    def __init__(self) -> None:
        self.stages: list[RoutingTally] = []

    def add(self, routings: Sequence[Routing], *, counted: bool = True) -> None:
        """Add the routings of a forward pass; one that is not `counted` tells the sizes only."""
        stages = _stages(routings)
        if not self.stages:
            self.stages = [
                RoutingTally(len(stage), stage[0].affinity.shape[1], stage[0].affinity.device)
                for stage in stages
            ]
        for tally, stage in zip(self.stages, stages, strict=True):
            if counted:
                tally.add(stage, None)

    def layers(self, ranks: Ranks = ALONE) -> tuple[LayerReport, ...]:
        return tuple(layer for tally in self.stages for layer in tally.layers(ranks))


def _stages(routings: Sequence[Routing]) -> list[list[Routing]]:
    """Group consecutive layers with the same numbers of tokens and experts."""
    stages: list[list[Routing]] = []
    for routing in routings:
        if stages and stages[-1][-1].affinity.shape == routing.affinity.shape:
            stages[-1].append(routing)
        else:
            stages.append([routing])
    return stages
