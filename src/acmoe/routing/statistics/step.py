"""Statistics that every optimizer step updates.

A training forward adds its batch to pending buffers (`ops/statistics/pending.py`); `update` merges
them into the running values. `step_hook.py` calls `update` after every step of a
`torch.optim.Optimizer`; `fold_statistics` does the same by hand. In data parallel training the
pending batches of all processes are added up first (`group.py`).
"""

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from acmoe.ops.dispatch import log_once
from acmoe.ops.statistics.over_ranks import world_size
from acmoe.ops.statistics.pending import replaying
from acmoe.routing.statistics.group import next_serial, update_all
from acmoe.routing.statistics.registry import inner_first
from acmoe.routing.statistics.step_hook import register_statistics

PATIENCE = 200  # training forwards without an update before a warning


class StepStatistics(nn.Module):
    """Base of running statistics: `forward` records a batch, `update` updates the running values.

    Recorded batches are pending in non-persistent buffers whose names begin with "last". `update`
    uses them once: a second call changes nothing.

    The buffers are float32. They move to another device with the module, and keep their dtype under
    `.to(bfloat16)`: a bf16 average stops changing once a step changes it by less than one part in
    256.
    """

    # Names of the pending buffers: means (C, X), or None, and the counts (C,) they are weighted by.
    pending_names: ClassVar[tuple[str | None, str] | None] = None
    group_name: str | None = None  # group of processes to pool with; None: not found yet
    found_group = False  # True: `group_name` was found, and not given to set_statistics_group
    everywhere = False  # True: every process of that group has these statistics
    forwards = 0  # eager training forwards after the last update
    has_pending = False  # True: an eager training forward came after the last update

    def __init__(self) -> None:
        super().__init__()
        self.serial = next_serial()
        # Pending batches of this process, where there are several. They are no buffers, because
        # DistributedDataParallel overwrites buffers by those of rank 0 between micro-batches.
        self.own: dict[str, Tensor] = {}
        register_statistics(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle or deepcopy; it is updated by optimizer steps as the original is."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.own = {}  # the copy has seen no batch of its own (`seen`)
        self.forget_found_group()  # the copy is in no wrapper, or in another one
        self.forwards = 0  # None in pickles of earlier versions
        self.has_pending = self.__dict__.pop("waiting", self.has_pending)  # its name in them
        self.serial = next_serial()
        register_statistics(self)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer; it is float32 under any `torch.set_default_dtype`."""
        if tensor is not None and tensor.is_floating_point():
            tensor = tensor.float()
        super().register_buffer(name, tensor, persistent)

    @property
    def device(self) -> torch.device:
        return next(iter(self.buffers())).device

    def forget_found_group(self) -> None:
        """Look for the group again when it is needed; one that the user has given stays."""
        if self.found_group:
            self.group_name = None
        self.found_group = self.everywhere = False

    @property
    def recorded(self) -> bool:
        """Return False if no training forward of this process has recorded a batch here.

        It is True on a single process, which need not know.
        """
        return world_size() == 1 or bool(self.own)

    @property
    def seen(self) -> bool:
        """Return False for a copy that may be on this process alone: nobody would pool it."""
        return self.pending_names is None or self.everywhere or self.recorded

    @property
    def pools(self) -> bool:
        """Return True if the pending batches of several processes are added up."""
        return self.pending_names is not None

    def pending_buffer(self, name: str) -> Tensor:
        """Return the tensor that a training forward adds its batch to."""
        buffer: Tensor = getattr(self, name)
        if world_size() == 1:
            return buffer
        if name not in self.own or self.own[name].device != buffer.device:
            self.own[name] = torch.zeros_like(buffer)
        return self.own[name]

    def pending_sums(self) -> Tensor:
        """Return the pending batches as one flat tensor of sums, which add up over processes."""
        assert self.pending_names is not None
        means, counts = self.pending_names
        count_C = self.pending_buffer(counts)
        if means is None:
            return count_C.flatten()
        mean_CX = torch.where(count_C[:, None] > 0, self.pending_buffer(means), 0.0)
        return torch.cat([count_C[:, None], count_C[:, None] * mean_CX], dim=1).flatten()

    def set_pending(self, sums: Tensor) -> None:
        """Put the sums over all processes into the pending buffers; drop those of this process."""
        assert self.pending_names is not None
        means, counts = self.pending_names
        count_C: Tensor = getattr(self, counts)
        if means is None:
            count_C.copy_(sums.view_as(count_C))
        else:
            total_CX = sums.view(len(count_C), -1)
            count_C.copy_(total_CX[:, 0])
            getattr(self, means).copy_(total_CX[:, 1:] / total_CX[:, :1].clamp(min=1))
        for tensor in self.own.values():
            tensor.zero_()

    def take_own(self) -> None:
        """Put the batches of this process alone into the pending buffers."""
        for name, tensor in self.own.items():
            getattr(self, name).copy_(tensor)
            tensor.zero_()

    def update(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define update")

    def count_forward(self) -> None:
        """Count a training forward; warn once if PATIENCE of them came without an update."""
        if torch.compiler.is_compiling() or replaying():
            return
        if "_is_replica" in self.__dict__:
            log_once(
                "running statistics: nn.DataParallel copies the model for every call, and only the "
                "tokens of its first device are counted; use DistributedDataParallel (torchrun)",
                logging.WARNING,
            )
        if not self.has_pending:  # to set an attribute of a module takes longer than to look
            self.has_pending = True
        object.__setattr__(self, "forwards", self.forwards + 1)
        if self.forwards == PATIENCE:
            log_once(
                f"running statistics: {PATIENCE} training forwards and no optimizer step that "
                "updates them; every step of a torch.optim.Optimizer does: with another "
                "optimizer call acmoe.fold_statistics(model) after each step",
                logging.WARNING,
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Empty the statistics, as at construction; pending batches are dropped."""
        for buffer in self._buffers.values():
            if buffer is not None:
                buffer.zero_()
        self.own.clear()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the running values; batches recorded before belong to other weights: drop them."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.own.clear()
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
