"""Statistics that move once per optimizer step, by themselves.

A training forward adds its batch to buffers that wait for the step (`ops/statistics/pending.py`);
`update` moves them into the running values. `step_hook.py` calls `update` after every step of a
`torch.optim.Optimizer`; `fold_statistics` does the same by hand.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.ops.dispatch import log_once
from acmoe.routing.step_hook import register_statistics

PATIENCE = 200  # training forwards without any update before a warning


class StepStatistics(nn.Module):
    """A module of float32 buffers. `forward` records a batch; `update` moves the running values.

    Recorded batches wait in non-persistent buffers whose names begin with "last". `update` uses
    them once: a second call changes nothing.

    The buffers move to another device with the module but stay float32 under `.to(bfloat16)`: a
    bf16 average stops changing once a step changes it by less than one part in 256.
    """

    # Eager training forwards before the first update; None after it.
    forwards: int | None = 0
    waiting = False  # True: an eager training forward came after the last update

    def __init__(self) -> None:
        super().__init__()
        register_statistics(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle or deepcopy; it is updated by optimizer steps as the original is."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register_statistics(self)

    def update(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define update")

    def count_forward(self) -> None:
        """Count a training forward; warn once if PATIENCE of them came without an update."""
        if torch.compiler.is_compiling():
            return
        self.waiting = True
        if self.forwards is None:
            return
        self.forwards += 1
        if self.forwards == PATIENCE:
            log_once(
                f"running statistics: {PATIENCE} training forwards and no optimizer step that "
                "moves them; they move after every step of a torch.optim.Optimizer: with another "
                "optimizer call acmoe.fold_statistics(model) after each step",
                logging.WARNING,
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Empty the statistics, as at construction; pending batches are dropped."""
        for buffer in self._buffers.values():
            if buffer is not None:
                buffer.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the running values; batches recorded before belong to other weights: drop them."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        loaded = [buffer for name, buffer in self._buffers.items() if prefix + name in state_dict]
        device = next((buffer.device for buffer in loaded if buffer is not None), None)
        for name, buffer in self._buffers.items():
            if device is None or buffer is None:
                continue
            if buffer.is_meta or buffer.dtype != torch.float32:
                # `assign=True` takes the dtype of the file, and leaves what is not in it on meta.
                fresh = torch.zeros_like(buffer, device=device, dtype=torch.float32)
                self._buffers[name] = fresh if buffer.is_meta else buffer.float()
            elif name.startswith("last"):
                buffer.zero_()

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
    """Update all running statistics of the model with the batches recorded since the last update.

    Every step of a `torch.optim.Optimizer` does this by itself, and a second call changes nothing.
    Call it after each step of an optimizer of another kind.
    """
    update_all(inner_first(model))


def inner_first(*modules: nn.Module) -> Iterator[StepStatistics]:
    """Yield the statistics in the modules once each, inner ones first.

    An outer scale may be computed from the results of an inner `update`.
    """
    found = itertools.chain.from_iterable(reversed(list(each.modules())) for each in modules)
    return iter(dict.fromkeys(one for one in found if isinstance(one, StepStatistics)))


def update_all(statistics: Iterable[StepStatistics]) -> None:
    for one in statistics:
        one.update()
        if one.waiting:
            one.waiting, one.forwards = False, None
