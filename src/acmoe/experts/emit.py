"""What a layer tells the next: each token's clusters, and the scale of each cluster.

The producer computes the scale because it has the tokens in hand: (C, D) numbers travel instead of
(T, D). A layer that no adaptive layer follows emits the identity and computes nothing.

T tokens, or B sequences of L tokens; D features, C clusters, J clusters per token.
"""

import torch
from torch import Tensor, nn

from acmoe.config.routing import AdaptiveConfig, RandomConfig
from acmoe.errors import UserError, check
from acmoe.ops.sort.op import Clusters, worth_sorting
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.baselines import RandomRouter
from acmoe.routing.cache import StatisticsSlot
from acmoe.routing.router import Router
from acmoe.routing.state import Routing, RoutingState, clusters_of, no_cluster
from acmoe.routing.statistics import ClusterStatistics

AS_ROUTER = "as the router"


def resolve_emit(
    emit: AdaptiveConfig | RandomConfig | str | None, router: Router
) -> AdaptiveConfig | RandomConfig | None:
    """The config of the next layer's router: the layer's own, unless another, or None, is given."""
    if emit == AS_ROUTER:
        return router.config if isinstance(router, AdaptiveRouter | RandomRouter) else None
    if emit is not None and not isinstance(emit, AdaptiveConfig | RandomConfig):
        raise UserError(
            f"emit={emit!r}; pass the next router's AdaptiveConfig or RandomConfig, or None"
        )
    return emit


class Emitter(nn.Module):
    """Writes the state that the router of config `reader`, in the next MoE layer, will read."""

    def __init__(
        self, reader: AdaptiveConfig | RandomConfig | None, *, num_clusters: int, dim: int
    ) -> None:
        super().__init__()
        self.reader = reader
        self.statistics: ClusterStatistics | None = None
        if isinstance(reader, AdaptiveConfig) and reader.reads == "previous":
            self.statistics = ClusterStatistics(reader, num_clusters=num_clusters, dim=dim)

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        slot: StatisticsSlot | None = None,
        source: Tensor | None = None,
        clusters: Clusters | None = None,
    ) -> RoutingState:
        """`source` holds the tokens statistics are taken of, where the reader asks for others.

        `clusters`: the tokens sorted by what `sorted_by` named, masked ones in none.
        """
        aux_loss = state.aux_loss + routing.loss
        if self.reader is None:
            assignment, membership = no_cluster(
                len(routing.affinity), 1, device=x.device, dtype=state.membership.dtype
            )
            return RoutingState(assignment, membership, torch.ones_like(state.scale), aux_loss)
        # The choice before any dropping: a full expert does not change where a token belongs.
        assignment, membership = clusters_of(
            routing.affinity,
            self.reader.mix,
            detach=getattr(self.reader, "detach", True),
            first_T1=routing.first,
        )
        # Under a mask the reader would have to know that it is the same one.
        carried = clusters if token_mask is None else None
        if self.statistics is None:
            scale = torch.ones_like(state.scale)
            return RoutingState(assignment, membership, scale, aux_loss, carried)
        source = self._measured(x, source)
        x_BLD = source if source.dim() == 3 else source[None]
        mask_BL = None if token_mask is None else token_mask.view(x_BLD.shape[:-1])
        first_BL = assignment[:, 0].view(x_BLD.shape[:-1])
        scale = self.statistics.cluster_scale(x_BLD, first_BL, mask_BL, slot, clusters)
        return RoutingState(assignment, membership, scale, aux_loss, carried)

    def sorted_by(self, routing: Routing) -> Tensor | None:
        """(T, 1) the clusters by which statistics and the next router would like tokens sorted.

        None where neither reads one cluster a token over the whole call, where the first choice
        would have to be looked for first, or where clusters are small.
        """
        if not isinstance(self.reader, AdaptiveConfig) or routing.first is None:
            return None
        mode = self.reader.modes[0 if self.training else 1]
        served = self.reader.mix == 1 and mode in ("batch", "running")
        return routing.first if served and worth_sorting(*routing.affinity.shape) else None

    def _measured(self, x: Tensor, source: Tensor | None) -> Tensor:
        assert isinstance(self.reader, AdaptiveConfig)
        if self.reader.source == "input":
            return x
        check(
            source is not None and source.shape == x.shape,
            f"gain={self.reader.gain} and read={self.reader.read!r} take statistics of tokens on "
            f"the way to the layer; pass source= of shape {tuple(x.shape)}, as the blocks of "
            "language models do",
        )
        assert source is not None
        return source

    def new_slot(
        self, num_sequences: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> StatisticsSlot | None:
        if self.statistics is None:
            return None
        return self.statistics.new_slot(num_sequences, device=device, dtype=dtype)
