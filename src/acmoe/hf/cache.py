"""Prefix statistics beside keys and values: a layer of a transformers `Cache`.

`Cache` reorders, repeats and selects all of its layers alike, so that beam search and the like keep
the moments of each sequence with its keys and values.

B sequences.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from acmoe.errors import UserError
from acmoe.routing.statistics.cache import StatisticsSlot


class StatisticsLayer(CacheLayerMixin):  # type: ignore[misc]
    """The decode slots of the routers of one stack, by depth. It holds no keys or values."""

    # `Cache` asks whether all layers are compileable, and makes masks for the first layer that is
    # sliding, or is not: in both the layers of keys and values decide.
    is_compileable = True
    is_croppable = False

    def __init__(
        self,
        stack: str,
        slots: dict[int, StatisticsSlot],
        *,
        is_sliding: bool,
        first: CacheLayerMixin | None = None,
    ) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.first = first  # the layer of keys and values that an offloading cache needs after this
        self.stack = stack
        self.slots = slots
        self.is_initialized = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._apply(lambda moment: moment.index_select(0, beam_idx.to(moment.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda moment: moment.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda moment: moment[indices.to(moment.device)])

    def reset(self) -> None:
        self._apply(torch.zeros_like)

    def crop(self, *removed: int) -> None:
        raise UserError(
            "statistics='prefix' cannot be cropped: its sums do not tell what the removed tokens "
            "added; generate without an assistant, or use statistics='running'"
        )

    def leave_inference_mode(self) -> None:
        """Copy moments that torch.inference_mode() made: outside of it they cannot be updated."""
        if not torch.is_inference_mode_enabled():
            self._apply(lambda moment: moment.clone() if moment.is_inference() else moment)

    def _apply(self, change: Callable[[Tensor], Tensor]) -> None:
        for slot in self.slots.values():
            assert slot.moments is not None
            slot.moments = type(slot.moments)(*map(change, slot.moments))

    # The rest says that this layer holds no tokens.
    def update(self, *states: Any, **options: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("this layer of the cache holds statistics, not keys and values")

    def lazy_initialization(self, *states: Any, **options: Any) -> None: ...

    def offload(self) -> None: ...

    def prefetch(self) -> None:
        """Prefetch the first layer of the model.

        While the last layer runs, an offloading `Cache` prefetches the next entry of its list. That
        would be the first layer again, were this entry not behind the last one.
        """
        if self.first is not None:
            self.first.prefetch()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def past_tokens(cache: Any) -> int:
    """Return the number of tokens in a cache; None is an empty one."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except ValueError:  # a cache of linear attention alone does not count its tokens
        return int(cache.has_previous_state())


def slots_in(cache: Any, stack: str) -> dict[int, StatisticsSlot] | None:
    """Return the decode slots of a stack by depth, or None if the cache holds none."""
    for layer in [] if cache is None else _layers(cache):
        if isinstance(layer, StatisticsLayer) and layer.stack == stack:
            layer.leave_inference_mode()
            return layer.slots
    return None


def store_slots(cache: Any, stack: str, slots: dict[int, StatisticsSlot]) -> None:
    """Add the decode slots of a stack to a cache, after the layers of keys and values."""
    layers = _layers(cache)
    sliding = all(getattr(layer, "is_sliding", False) for layer in layers)
    first = _first_offloaded(getattr(cache, "self_attention_cache", cache))
    layers.append(StatisticsLayer(stack, slots, is_sliding=sliding, first=first))


def cache_of(output: Any) -> Any:
    """Return the cache that a model's output holds, or None."""
    values = tuple(output.values()) if isinstance(output, dict) else output
    values = values if isinstance(values, tuple | list) else ()
    return next((value for value in values if isinstance(value, Cache)), None)


def _first_offloaded(cache: Any) -> Any:
    """Return the first layer that an offloading cache moves to the CPU after its call, or None."""
    if not getattr(cache, "offloading", False):
        return None
    linear = getattr(cache, "is_linear", [False] * len(cache.layers))
    stays = (
        one or (sliding and cache.only_non_sliding)
        for one, sliding in zip(linear, cache.is_sliding, strict=True)
    )
    return next((layer for layer, kept in zip(cache.layers, stays, strict=True) if not kept), None)


def _layers(cache: Any) -> list[Any]:
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    if not isinstance(layers, list):
        raise UserError(
            f"past_key_values is a {type(cache).__name__}, which has no place for prefix "
            "statistics; pass a transformers DynamicCache or StaticCache, or none"
        )
    return layers
