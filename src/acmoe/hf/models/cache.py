"""The library's decode cache, where `generate` expects one of transformers' caches."""

from typing import NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from acmoe.errors import UserError
from acmoe.models.text.memory import DecodeCache


class AcmoeCache(Cache):  # type: ignore[misc]
    """Keys, values and routing statistics of earlier positions; `seen` counts the positions."""

    is_compileable = False

    def __init__(self, cache: DecodeCache) -> None:
        super().__init__(layers=[])
        self.cache = cache
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return -1: there is no limit. Positions outside the attention span are dropped."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each beam the cache of the beam that it continues."""
        self.cache.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.cache.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        mask = self.cache.mask.storage
        if mask is not None:
            rows = torch.arange(len(mask), device=mask.device)
            self.cache.select(rows.repeat_interleave(repeats))

    def crop(self, max_length: int) -> NoReturn:
        raise UserError(
            f"crop({max_length}): keys outside the attention span and earlier routing statistics "
            "are gone; decode without an assistant or prompt lookup"
        )
