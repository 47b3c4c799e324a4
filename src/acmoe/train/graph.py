"""Training updates as CUDA graphs: one launch by the host instead of a thousand.

A replay reads and writes the tensors that were captured. Tensors that change from update to update
therefore keep their address: the batch, the attention memory of the streams, the learning rate.
The captured optimizer step updates the running statistics too (routing/statistics/step_hook.py).
Changes on the host only, such as freezing a router during the run, need a new capture.
"""

from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.fast.rows import copy_rows
from acmoe.train.update import Update

WARM_UP = 2  # eager updates of each kind before a capture: they compile kernels, allocate moments


class StepGraph:
    """Runs `step` eagerly for the first updates, then captures it once and replays the graph.

    Warm-up and replays are all real updates. The argument of `step` tells whether the routing is
    recorded; updates with and without recording have separate graphs.
    """

    def __init__(self, step: Callable[[bool], Update]) -> None:
        self.step = step
        self.places: dict[Hashable, Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """Drop the captured graphs, because something has changed on the host; capture again."""
        self.calls: Counter[bool] = Counter()
        self.captured: dict[bool, tuple[torch.cuda.CUDAGraph, Update]] = {}

    def hold(self, name: Hashable, new: Tensor) -> Tensor:
        """Copy `new` into the static tensor of that name, which graphs read; return the tensor."""
        if name not in self.places:
            self.places[name] = new.contiguous()
        static = self.places[name]
        if static is not new:
            assert static.shape == new.shape and static.dtype == new.dtype, name
            copy_rows(static, new)
        return static

    def __call__(self, record: bool) -> Update:
        """Take an update: eager, captured or replayed."""
        if self.calls[record] < WARM_UP:
            self.calls[record] += 1
            return self.step(record)
        if record not in self.captured:
            self.captured[record] = self._capture(record)
        graph, update = self.captured[record]
        graph.replay()
        return update

    def _capture(self, record: bool) -> tuple[torch.cuda.CUDAGraph, Update]:
        graph = torch.cuda.CUDAGraph()
        pools = [other.pool() for other, _ in self.captured.values()]  # they never run at once
        with torch.cuda.graph(graph, pool=pools[0] if pools else None):
            update = self.step(record)
        return graph, update


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Turn learning rates into device tensors, which every replay of a graph reads again."""
    check(
        device.type == "cuda",
        f"graph=true replays CUDA graphs; device={device} has none: leave it out",
    )
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
