"""Decode slots: the statistics of past steps, kept beside the KV cache, one slot a layer.

One token has no dispersion, so decoding reads what prefill saw. Slots are preallocated, written in
place and used in inference only. `running` statistics need no slot: they are frozen buffers.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.statistics.prefix import PrefixMoments


@dataclass
class StatisticsSlot:
    """Running sums of each sequence (prefix), or the scale prefill used (batch, sequence)."""

    moments: PrefixMoments | None = None
    scale: Tensor | None = None  # (C, D), or (B, C, D) for sequence statistics
    filled: bool = False  # prefill has written `scale`
    kept: dict[str, Tensor] = field(default_factory=dict)  # what else prefill used, by name

    def remember(self, after: PrefixMoments) -> None:
        assert self.moments is not None
        for kept, new in zip(self.moments, after, strict=True):
            kept.copy_(new)

    def scale_once(self, scale: Tensor) -> Tensor:
        """The first call's scale, then and ever after."""
        assert self.scale is not None
        if not self.filled:
            self.scale.copy_(scale)
            self.filled = True
        return self.scale


class LayerCache(NamedTuple):
    """The slots of one MoE layer: its router's statistics, and those it emits to the next."""

    router: StatisticsSlot | None
    emit: StatisticsSlot | None


def check_inference(x: Tensor) -> None:
    check(
        not (torch.is_grad_enabled() and x.requires_grad),
        "cache was passed while gradients are recorded; decode under torch.no_grad()",
    )
