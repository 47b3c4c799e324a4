"""Buffers that change once per optimizer step, never inside `forward`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class StepStatistics(nn.Module):
    """A module of float32 buffers. `forward` overwrites some; `update` adds them to an average.

    The buffers move to another device with the module but stay float32 under `.to(bfloat16)`: a
    bf16 average stops changing once a step changes it by less than one part in 256.
    """

    def update(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define update")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StepStatistics":
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in buffers.items():
            after = self._buffers[name]
            assert after is not None
            if before.is_meta or after.is_meta:
                self._buffers[name] = torch.zeros_like(after, dtype=torch.float32)
            else:
                self._buffers[name] = before.to(after.device)
        return self


def fold_statistics(model: nn.Module) -> None:
    """Update the running statistics with the last batch; call it after every optimizer step.

    This updates every running dispersion and every loss-free balancing bias of the model.
    """
    # Inner modules first: an outer scale may be computed from the results of an inner `update`.
    for module in reversed(list(model.modules())):
        if isinstance(module, StepStatistics):
            module.update()
