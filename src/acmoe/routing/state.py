"""What one MoE layer tells the next, and what a router decides.

Two axes are kept apart: `RoutingState` flows from layer to layer inside one forward pass, the
decode slots of cache.py from step to step. Both are arguments; nothing is remembered by a module.

T tokens, D features, E experts, C = E clusters, K experts per token, J clusters per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.sort.op import Clusters


class Routing(NamedTuple):
    """One router's decision, used by the experts of the same layer."""

    expert_ids: Tensor  # (T, K) int64; E itself means "no expert": below a threshold, or dropped
    gate: Tensor  # (T, K) combine weights, 0 where there is no expert
    affinity: Tensor  # (T, E) token-expert affinities in the scaled space, training noise included
    loss: Tensor  # () float32 weighted auxiliary losses of this layer
    first: Tensor | None = None  # (T, 1) argmax of the affinity, of a router that has it in hand


class RoutingState(NamedTuple):
    """What the next MoE layer needs of this one. Tensors only, all contiguous.

    `clusters` saves time and says nothing new: without it every result is the same to rounding.
    """

    assignment: Tensor  # (T, J) int64 clusters of each token, best first; -1: none yet
    membership: Tensor  # (T, J) weights of those clusters, summing to one
    scale: Tensor  # (C, D) diagonals of M; ones where the reader takes its own statistics
    aux_loss: Tensor  # () float32 sum over the MoE layers so far
    clusters: Clusters | None = None  # the tokens sorted by assignment, where the experts' sort was

    @property
    def sorted(self) -> Clusters | None:
        """`clusters`, unless the assignment has been replaced since; nobody writes into a state."""
        known = self.clusters is not None and self.clusters.assignment is self.assignment
        return self.clusters if known else None

    @classmethod
    def identity(
        cls,
        *,
        num_tokens: int,
        num_clusters: int,
        dim: int,
        mix: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "RoutingState":
        """The state before the first MoE layer: M = I, no token in any cluster.

        With it every adaptive router is bitwise its base router, in every statistics mode.
        """
        assignment, membership = no_cluster(num_tokens, mix, device=device, dtype=dtype)
        scale = torch.ones(num_clusters, dim, device=device, dtype=dtype)
        aux_loss = torch.zeros((), device=device)
        return cls(assignment, membership, scale, aux_loss)


def no_cluster(
    num_tokens: int, mix: int, *, device: torch.device | str | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    assignment = torch.full((num_tokens, mix), -1, device=device, dtype=torch.int64)
    membership = torch.zeros(num_tokens, mix, device=device, dtype=dtype)
    membership[:, 0] = 1.0
    return assignment, membership


def clusters_of(
    affinity_TE: Tensor, mix: int, *, detach: bool = True, first_T1: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each token's `mix` best clusters, best first, and their renormalised affinities.

    The first is the argmax, never column 0 of an unsorted top-k; `first_T1` if that is known. Which
    cluster a token belongs to is a label; how much of each, part of its scale, has a gradient
    unless detached.
    """
    if detach:
        affinity_TE = affinity_TE.detach()
    if mix == 1:
        assignment_TJ = affinity_TE.argmax(-1, keepdim=True) if first_T1 is None else first_T1
        return assignment_TJ, torch.ones_like(assignment_TJ, dtype=affinity_TE.dtype)
    best_TE, order_TE = affinity_TE.sort(dim=-1, descending=True, stable=True)
    return order_TE[:, :mix].contiguous(), best_TE[:, :mix].softmax(-1)


def check_mix(mix: int, num_clusters: int) -> None:
    check(mix <= num_clusters, f"mix={mix} exceeds num_experts={num_clusters}; lower mix")


def check_state(state: RoutingState, x: Tensor, mix: int, num_clusters: int) -> None:
    """The state fits the tokens and the reader."""
    num_tokens, dim = x.shape[:-1].numel(), x.shape[-1]
    check(
        state.assignment.shape == (num_tokens, mix),
        f"state.assignment has shape {tuple(state.assignment.shape)}; {num_tokens} tokens and "
        f"mix={mix} need ({num_tokens}, {mix}): begin with RoutingState.identity(num_tokens="
        f"{num_tokens}, mix={mix}, ...), and let the layer before emit for this router",
    )
    check(
        state.scale.shape[0] == num_clusters,
        f"state.scale has {state.scale.shape[0]} clusters; the reader has {num_clusters}: "
        "consecutive MoE layers must agree on num_experts",
    )
    check(
        state.scale.shape[1] == dim,
        f"state.scale has {state.scale.shape[1]} features; the tokens have {dim}: where the width "
        "changes, begin anew with RoutingState.identity(...)",
    )
