"""The cache of one block: keys, values and routing statistics of earlier positions.

Shapes: B batch, H heads, L new positions, N cached and new positions, P features of a head.
"""

from torch import Tensor

from acmoe.models.text.rotary import rotate
from acmoe.ops.attention import window_attention
from acmoe.ops.statistics.prefix import PrefixMoments
from acmoe.routing.statistics.cache import CarriedMoments, LayerCache


class SlidingStore:
    """The last `span` positions of a growing tensor, in preallocated storage written in place.

    The storage has space for up to `span` positions after the window, so that the window is moved
    back to the front once in `span` steps instead of in every step.
    """

    def __init__(self, span: int, dim: int) -> None:
        self.span = span
        self.dim = dim
        self.end = 0
        self.storage: Tensor | None = None

    def extend(self, new: Tensor) -> Tensor:
        """Append `new` along `dim`; return a view of up to `span` earlier positions and `new`."""
        added = new.shape[self.dim]
        if self.storage is None or self.end + added > self.storage.shape[self.dim]:
            self._reallocate(new)
        assert self.storage is not None
        self.storage.narrow(self.dim, self.end, added).copy_(new)
        first = max(0, self.end - self.span)
        self.end += added
        return self.storage.narrow(self.dim, first, self.end - first)

    def last(self) -> Tensor:
        """Return a view of the last positions, up to `span`."""
        assert self.storage is not None, "nothing was appended yet"
        number = min(self.end, self.span)
        return self.storage.narrow(self.dim, self.end - number, number)

    def _reallocate(self, new: Tensor) -> None:
        moved = min(self.end, self.span)
        shape = list(new.shape)
        shape[self.dim] = moved + new.shape[self.dim] + min(self.span, moved + new.shape[self.dim])
        storage = new.new_empty(shape)
        if self.storage is not None:
            last = self.storage.narrow(self.dim, self.end - moved, moved)
            storage.narrow(self.dim, 0, moved).copy_(last)
        self.storage, self.end = storage, moved

    def select(self, rows: Tensor) -> None:
        """Keep the given sequences of the batch, in this order; `rows` may repeat some."""
        if self.storage is not None:
            self.storage = self.storage.index_select(0, rows)


class BlockCache:
    """One block's projected keys and values, and its MoE layer's routing statistics."""

    def __init__(self, span: int, routing: LayerCache | None) -> None:
        self.routing = routing
        self.position: int | Tensor = 0  # position of the next token in its stream
        self._keys = SlidingStore(span, dim=2)
        self._values = SlidingStore(span, dim=2)

    def extend(self, k_BHLP: Tensor, v_BHLP: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values; return (B, H, N, P) those that the new positions may see."""
        self.position += k_BHLP.shape[2]
        return self._keys.extend(k_BHLP), self._values.extend(v_BHLP)

    def select(self, rows: Tensor) -> None:
        """Keep the given sequences of the batch, in this order; `rows` may repeat some."""
        self._keys.select(rows)
        self._values.select(rows)
        for slot in self.routing or ():
            if slot is not None:
                slot.select(rows)

    def rotate(self, q_BHLP: Tensor, k_BHNP: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate keys and queries by their positions: N keys from the cache's position on.

        The L queries are at the last L of these positions.
        """
        later = k_BHNP.shape[2] - q_BHLP.shape[2]
        return rotate(q_BHLP, self.position + later), rotate(k_BHNP, self.position)

    def attend(
        self,
        q_BHLP: Tensor,
        k_BHLP: Tensor,
        v_BHLP: Tensor,
        *,
        span: int,
        positions: Tensor | None,
        key_mask: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Append keys and values, then attend from the new positions to those they may see."""
        k_BHNP, v_BHNP = self.extend(k_BHLP, v_BHLP)
        return window_attention(
            *(q_BHLP, k_BHNP, v_BHNP),
            span=span,
            positions=positions,
            key_mask=key_mask,
            dropout=dropout,
        )

    def last(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values (B, H, N, P) of the last positions, up to the span."""
        return self._keys.last(), self._values.last()


class SegmentCache(BlockCache):
    """The cache of a block that runs a whole segment: routing statistics of earlier segments.

    It holds no keys and values. Those of earlier positions are computed from the context.
    """

    def __init__(self, moments: PrefixMoments) -> None:
        self.carried = CarriedMoments(moments=moments)
        super().__init__(0, LayerCache(self.carried, None))

    def extend(self, k_BHLP: Tensor, v_BHLP: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are."""
        return k_BHLP, v_BHLP

    @property
    def after(self) -> PrefixMoments | None:
        """Return the moments after the segment; those before it if the block has not run."""
        return self.carried.after or self.carried.moments
