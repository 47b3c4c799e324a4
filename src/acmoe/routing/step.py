"""Buffers that change once per optimizer step, never inside `forward`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class StepStatistics(nn.Module):
    """float32 buffers filled by `forward` (overwritten, not added to) and folded in by `fold`.

    They follow the module to a device but stay float32 under `.to(bfloat16)`: a bf16 average stops
    moving once a step changes it by less than one part in 256.
    """

    def fold(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define fold")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StepStatistics":
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            assert after is not None
            if before.is_meta or after.is_meta:
                self._buffers[name] = torch.zeros_like(after, dtype=torch.float32)
            else:
                self._buffers[name] = before.to(after.device)
        return self


def fold_statistics(model: nn.Module) -> None:
    """Call once after every optimizer step: folds the last batch into the running averages.

    Updates every running dispersion and every loss-free balancing bias of the model.
    """
    # Inner ones first: a scale worked out by one `fold` may read what another moved on.
    for module in reversed(list(model.modules())):
        if isinstance(module, StepStatistics):
            module.fold()
