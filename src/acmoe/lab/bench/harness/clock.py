"""Time several functions in interleaved rounds, so that a drifting clock rate affects all alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from acmoe.errors import check

Action = Callable[[], object]

_FLUSH_BYTES = 256 * 2**20  # larger than any L2 cache
# The flushes take about 3 milliseconds, in which the host queues the call: in a training loop the
# host is ahead of the device, too. A call that takes longer to queue shows its launch overhead,
# unless it is captured in a graph.
_FLUSHES = 48


class Timing(NamedTuple):
    """Median and quartiles of the time of one call, in milliseconds."""

    median: float
    low: float
    high: float


def timing(samples: Sequence[float]) -> Timing:
    """Compute median and quartiles of two or more samples, with linear interpolation."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, low, high)


class Clock(Protocol):
    """Measures the time of one call in milliseconds."""

    def measure(self, action: Action) -> float: ...


class HostClock:
    """Clock for a CPU, where a call has ended when it returns."""

    def measure(self, action: Action) -> float:
        start = time.perf_counter()
        action()
        return 1e3 * (time.perf_counter() - start)


class CudaClock:
    """Clock with CUDA events around the call, which starts with cold caches and a full queue."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def measure(self, action: Action) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        for _ in range(_FLUSHES):
            self.buffer.zero_()
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


def interleave(
    actions: Mapping[str, Action], *, rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Time every action once per round, in milliseconds, in an order drawn anew for each round.

    A GPU at its power limit is faster after a call that let it cool. In a fixed order, an action's
    time would depend on the action before it.
    """
    check(rounds >= 2, f"repeat={rounds}; quartiles need at least 2 rounds")
    names = list(actions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    draw = random.Random(0)
    for _ in range(rounds):
        draw.shuffle(names)
        for name in names:
            samples[name].append(clock.measure(actions[name]))
    return samples


def timings(samples: Mapping[str, Sequence[float]]) -> dict[str, Timing]:
    return {name: timing(found) for name, found in samples.items()}


def extra_memory(action: Action, device: torch.device) -> int | None:
    """Return a call's peak memory beyond what was allocated before, in bytes; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def warmed_memory(action: Action, device: torch.device, *, calls: int) -> int | None:
    """Warm an action up by some calls, then return its `extra_memory`."""
    for _ in range(calls):
        action()
    return extra_memory(action, device)


def in_mib(memory: int | None) -> float | None:
    """Convert bytes to MiB; None stays None."""
    return None if memory is None else memory / 2**20


def capture(action: Action) -> Action:
    """Capture the call in a CUDA graph and return its replay, which has no launch overhead."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return Replay(graph, action)


class Replay:
    """A CUDA graph. It also holds the captured call, to keep alive the weights the graph reads."""

    def __init__(self, graph: torch.cuda.CUDAGraph, action: Action) -> None:
        self.graph, self.action = graph, action

    def __call__(self) -> None:
        self.graph.replay()
