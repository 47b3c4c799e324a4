"""What decoding keeps between steps, so that a new token costs one token.

Shapes: B batch, H heads, L new positions, N positions in view, P features of a head.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from acmoe.routing.cache import LayerCache


class SlidingStore:
    """The last positions of a growing tensor, in preallocated storage written in place.

    Room for as many positions again lies behind the window, so that moving the window back to the
    front happens once in `span` steps instead of at every one.
    """

    def __init__(self, span: int, dim: int) -> None:
        self.span = span
        self.dim = dim
        self.end = 0
        self.storage: Tensor | None = None

    def extend(self, new: Tensor) -> Tensor:
        """Append along `dim`; a view of up to `span` earlier positions and all the new ones."""
        added = new.shape[self.dim]
        if self.storage is None or self.end + added > self.storage.shape[self.dim]:
            self._make_room(new)
        assert self.storage is not None
        self.storage.narrow(self.dim, self.end, added).copy_(new)
        first = max(0, self.end - self.span)
        self.end += added
        return self.storage.narrow(self.dim, first, self.end - first)

    def _make_room(self, new: Tensor) -> None:
        kept = min(self.end, self.span)
        shape = list(new.shape)
        shape[self.dim] = kept + new.shape[self.dim] + min(self.span, kept + new.shape[self.dim])
        storage = new.new_empty(shape)
        if self.storage is not None:
            last = self.storage.narrow(self.dim, self.end - kept, kept)
            storage.narrow(self.dim, 0, kept).copy_(last)
        self.storage, self.end = storage, kept


class BlockCache:
    """One block's projected keys and values, and its MoE layer's routing statistics."""

    def __init__(self, span: int, routing: LayerCache | None) -> None:
        self.routing = routing
        self.position = 0  # of the next token, counted from the stream's first
        self._keys = SlidingStore(span, dim=2)
        self._values = SlidingStore(span, dim=2)

    def extend(self, k_BHLP: Tensor, v_BHLP: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, N, P) keys and values in view of the new positions."""
        self.position += k_BHLP.shape[2]
        return self._keys.extend(k_BHLP), self._values.extend(v_BHLP)


@dataclass
class DecodeCache:
    """One `BlockCache` a block, and which of the positions in view are real tokens."""

    blocks: list[BlockCache]
    mask: SlidingStore
    masked: bool = field(default=False)  # a padded position was seen

    def extend_mask(self, tokens_BL: Tensor, token_mask_BL: Tensor | None) -> Tensor | None:
        """(B, N) the keys that may be seen; None while every position was a real token."""
        real_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        self.masked = self.masked or token_mask_BL is not None
        view_BN = self.mask.extend(real_BL if token_mask_BL is None else token_mask_BL)
        return view_BN if self.masked else None
