"""Decoding cache of the routing statistics, one slot per layer, beside the KV cache.

One token has no dispersion, so decoding uses the statistics of prefill. Slots are preallocated,
written in place, and for inference only. `running` statistics need no slot: they are frozen
buffers. `CarriedMoments` is for training as well: it continues prefix statistics from one segment
of a stream to the next.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from acmoe.errors import UserError, check
from acmoe.ops.statistics.prefix import PrefixMoments

MOST_TOKENS = 2**20  # carried moments count a larger cluster as half as many


@dataclass
class StatisticsSlot:
    """Moments of each sequence (prefix statistics), or prefill's scale (batch, sequence)."""

    inference_only: ClassVar[bool] = True
    moments: PrefixMoments | None = None
    scale: Tensor | None = None  # (C, D), or (B, C, D) for sequence statistics
    filled: bool = False  # prefill has written `scale`
    # other tensors that prefill used, by name
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int | None:
        """Return the batch size it was made for; None if it holds one scale for all."""
        if self.moments is not None:
            return self.moments.tokens.shape[0]
        return len(self.scale) if self.scale is not None and self.scale.dim() == 3 else None

    def store(self, after: PrefixMoments) -> None:
        """Store the moments after this call."""
        assert self.moments is not None
        for moment, new in zip(self.moments, after, strict=True):
            moment.copy_(new)

    def select(self, rows: Tensor) -> None:
        """Keep the given sequences of the batch, in this order; one scale for all stays."""
        if self.moments is not None:
            self.moments = PrefixMoments(*(moment.index_select(0, rows) for moment in self.moments))
        if self.scale is not None and self.scale.dim() == 3:
            self.scale = self.scale.index_select(0, rows)

    def scale_once(self, scale: Tensor) -> Tensor:
        """Store the scale of the first call; return the stored scale in every call."""
        assert self.scale is not None
        if not self.filled:
            self.scale.copy_(scale)
            self.filled = True
        return self.scale


@dataclass
class CarriedMoments(StatisticsSlot):
    """`moments` of the stream's earlier segments, and those `after` the segment of this call.

    A segment may be computed twice (activation checkpointing). So `store` leaves `moments` alone
    and overwrites `after`.
    """

    inference_only: ClassVar[bool] = False
    after: PrefixMoments | None = None

    def store(self, after: PrefixMoments) -> None:
        """Keep the moments after this call, without their gradient.

        A float32 sum of more than 2^24 ones stops growing. So a cluster of more than 2^20 tokens
        counts as half as many, with half the spread; their quotient, the dispersion, stays.
        """
        tokens_BC, mean_BCD, spread_BCD = (moment.detach() for moment in after)
        share_BC = torch.where(tokens_BC > MOST_TOKENS, 0.5, 1.0).to(tokens_BC.dtype)
        self.after = PrefixMoments(tokens_BC * share_BC, mean_BCD, spread_BCD * share_BC[..., None])


class LayerCache(NamedTuple):
    """The slots of one MoE layer: its router's statistics, and those for the next layer."""

    router: StatisticsSlot | None
    next_state: StatisticsSlot | None


def check_cache(cache: object, x: Tensor) -> None:
    """Raise a UserError unless this is a layer's cache, made for as many sequences as x has."""
    if not isinstance(cache, LayerCache):
        raise UserError(
            f"cache is a {type(cache).__name__}; pass this layer's own, which its new_cache gave, "
            "or None"
        )
    found = x.shape[0] if x.dim() == 3 else 1
    for slot in cache:
        made_for = None if slot is None else slot.num_sequences
        if made_for not in (None, found):
            raise UserError(
                f"cache was made for {made_for} sequences, and x has {found}; call "
                f"new_cache({found}, ...)"
            )


def check_inference(x: Tensor) -> None:
    """Raise a UserError if gradients are recorded."""
    check(
        not (torch.is_grad_enabled() and x.requires_grad),
        "cache was passed while gradients are recorded; decode under torch.no_grad()",
    )
