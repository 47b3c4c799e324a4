"""The decode cache of one block: keys, values and routing statistics of earlier positions.

Shapes: B batch, H heads, L new positions, N cached and new positions, P features of a head.
"""

from torch import Tensor

from acmoe.routing.cache import LayerCache


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

    def _reallocate(self, new: Tensor) -> None:
        moved = min(self.end, self.span)
        shape = list(new.shape)
        shape[self.dim] = moved + new.shape[self.dim] + min(self.span, moved + new.shape[self.dim])
        storage = new.new_empty(shape)
        if self.storage is not None:
            last = self.storage.narrow(self.dim, self.end - moved, moved)
            storage.narrow(self.dim, 0, moved).copy_(last)
        self.storage, self.end = storage, moved


class BlockCache:
    """One block's projected keys and values, and its MoE layer's routing statistics."""

    def __init__(self, span: int, routing: LayerCache | None) -> None:
        self.routing = routing
        self.position = 0  # position of the next token in its stream
        self._keys = SlidingStore(span, dim=2)
        self._values = SlidingStore(span, dim=2)

    def extend(self, k_BHLP: Tensor, v_BHLP: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values; return (B, H, N, P) those that the new positions may see."""
        self.position += k_BHLP.shape[2]
        return self._keys.extend(k_BHLP), self._values.extend(v_BHLP)
