"""An update as a CUDA graph: one launch by the host instead of a thousand.

A replay reads and writes the very tensors that were captured. What changes from update to update
therefore keeps its place in memory: the batch, the memory of the streams, the learning rate. What
changes on the host alone, such as a router that is frozen on the way, asks for a new capture.
"""

from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.rows import copy_rows
from acmoe.train.update import Update

WARM_UP = 2  # updates of each kind before a capture: kernels are compiled, moments allocated


class StepGraph:
    """Calls of `step`, real updates all of them: the first ones as they are, later ones replayed.

    `step` takes whether the routing is recorded; each of the two has a graph of its own.
    """

    def __init__(self, step: Callable[[bool], Update]) -> None:
        self.step = step
        self.places: dict[Hashable, Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """Capture anew: something that the host decides has changed."""
        self.calls: Counter[bool] = Counter()
        self.captured: dict[bool, tuple[torch.cuda.CUDAGraph, Update]] = {}

    def hold(self, name: Hashable, new: Tensor) -> Tensor:
        """`new`, in the place where graphs find what goes by this name."""
        if name not in self.places:
            self.places[name] = new.contiguous()
        kept = self.places[name]
        if kept is not new:
            assert kept.shape == new.shape and kept.dtype == new.dtype, name
            copy_rows(kept, new)
        return kept

    def __call__(self, record: bool) -> Update:
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
        pools = [other.pool() for other, _ in self.captured.values()]  # never replayed at one time
        with torch.cuda.graph(graph, pool=pools[0] if pools else None):
            update = self.step(record)
        return graph, update


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Learning rates as tensors, which a captured update reads anew in every replay."""
    check(
        device.type == "cuda",
        f"graph=true replays CUDA graphs; device={device} has none: leave it out",
    )
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
