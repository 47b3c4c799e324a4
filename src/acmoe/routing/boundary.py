"""The tensors of a routing state that cross from one pipeline stage to the next.

Only what the next router reads is sent. The rest has known values, or only saves time.

T tokens, D features, C clusters, J clusters per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig
from acmoe.ops.sort.order import no_order
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.next_state import NextState
from acmoe.routing.origin import NextRouter, new_origin, origin_codes
from acmoe.routing.state import RoutingState


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """A cut between two layers of a network, described by the MoE layer before it.

    The hidden states and the auxiliary loss always cross the cut. The (T, J) clusters cross where a
    rescaling router follows, their (T, J) weights where it mixes clusters, and the (C, D) scale
    where it takes the statistics of the previous layer.
    """

    num_clusters: int
    next_router: NextRouter | None = None  # the MoE layer before computes its state for this
    codes: tuple[int, ...] = ()  # `origin_codes` of the state; (): no MoE layer comes before

    @classmethod
    def after(cls, layer: NextState | None, *, num_clusters: int) -> "Boundary":
        """Return the cut after the MoE layer with this `next_state`; None: before the first one."""
        if layer is None:
            return cls(num_clusters=num_clusters)
        codes = origin_codes(layer.next_router)
        return cls(num_clusters=num_clusters, next_router=layer.next_router, codes=codes)

    @property
    def mix(self) -> int:
        """Return J, the number of clusters of a token."""
        return 1 if self.next_router is None else self.next_router.mix

    @property
    def has_weights(self) -> bool:
        """Return True if the weights of a token's clusters cross; a single one has weight 1."""
        return self.mix > 1

    @property
    def has_scale(self) -> bool:
        """Return True if the scale crosses, because the next router reads it.

        A router that measures its own tokens reads it only with mean_over="chosen": the scale is
        zero for clusters after the last that a token chose.
        """
        reader = self.next_router
        if not isinstance(reader, AdaptiveConfig):
            return False
        return reader.reads == "previous" or reader.mean_over == "chosen"

    def pack(self, x: Tensor, state: RoutingState) -> tuple[Tensor, ...]:
        """Return the tensors to send: x, the auxiliary loss (1,), and the parts that cross."""
        dtype = accumulation_dtype(x.dtype)
        sent = [x.contiguous(), state.aux_loss.reshape(1).to(dtype)]
        if self.next_router is not None:
            sent.append(state.assignment.to(torch.int32))
        if self.has_weights:
            sent.append(state.membership.to(dtype).contiguous())
        if self.has_scale:
            sent.append(state.scale.to(dtype).contiguous())
        return tuple(sent)

    def unpack(self, x: Tensor, aux_loss: Tensor, *sent: Tensor) -> tuple[Tensor, RoutingState]:
        """Return x and the routing state that `pack` was given, up to the order of the tokens."""
        state = RoutingState.before(x, num_clusters=self.num_clusters, mix=self.mix)
        assignment, membership, scale = state[:3]
        parts = iter(sent)
        if self.next_router is not None:
            assignment = next(parts).to(torch.int64)
            membership = next(parts) if self.has_weights else membership
            scale = next(parts) if self.has_scale else scale
        aux_loss = aux_loss[0]
        rest = no_order(x), new_origin(self.codes, x)
        return x, RoutingState(assignment, membership, scale, aux_loss, *rest)

    def tensors(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return tensors like those of `pack`, on the meta device, for hidden states like x.

        They require a gradient where one flows back to the stage before.
        """
        num_tokens, dim = x.shape[:-1].numel(), x.shape[-1]
        dtype = accumulation_dtype(x.dtype)
        gradient = self.next_router is not None and not self.next_router.detach

        def like(*shape: int, of: torch.dtype = dtype, gradient: bool = True) -> Tensor:
            found = torch.empty(shape, dtype=of, device="meta")
            return found.requires_grad_(gradient)

        found = [like(*x.shape, of=x.dtype), like(1)]
        if self.next_router is not None:
            found.append(like(num_tokens, self.mix, of=torch.int32, gradient=False))
        if self.has_weights:
            found.append(like(num_tokens, self.mix, gradient=gradient))
        if self.has_scale:
            found.append(like(self.num_clusters, dim, gradient=gradient))
        return tuple(found)
