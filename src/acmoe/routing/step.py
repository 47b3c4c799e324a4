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


@torch.no_grad()
def fold_average(
    average_CX: Tensor, weight_C: Tensor, last_CX: Tensor, count_C: Tensor, momentum: float
) -> None:
    """Move a batch's means into an average, each cluster weighted by its tokens, in place.

    A cluster the batch did not reach (or reached once: one token has no dispersion) keeps its
    average and its weight, so a rare expert keeps its history.
    """
    count_C = torch.where(count_C >= 2, count_C, 0.0)
    kept_C = torch.where(count_C > 0, momentum * weight_C, weight_C)
    total_C = kept_C + count_C
    share_C1 = (count_C / total_C.clamp(min=1e-12))[:, None]
    # lerp by 0 would still read a NaN of the batch; such a batch is not folded in.
    sound_C1 = torch.isfinite(last_CX).all(-1, keepdim=True) & (share_C1 > 0)
    mixed_CX = average_CX + share_C1 * (last_CX - average_CX)
    average_CX.copy_(torch.where(sound_C1, mixed_CX, average_CX))
    weight_C.copy_(torch.where(sound_C1[:, 0], total_C, weight_C))
