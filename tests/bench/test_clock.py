"""Timing: who runs when, and what is made of the samples."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from acmoe.bench.clock import (
    Action,
    HostClock,
    Replay,
    Timing,
    extra_memory,
    interleave,
    timing,
)
from acmoe.errors import UserError


class ScriptedClock:
    """Runs the action, and reads the next of the given times."""

    def __init__(self, times: list[float]) -> None:
        self.times: Iterator[float] = iter(times)

    def measure(self, action: Action) -> float:
        action()
        return next(self.times)


def test_every_round_runs_each_action_once_and_begins_with_the_next() -> None:
    calls: list[str] = []
    actions: dict[str, Action] = {name: lambda name=name: calls.append(name) for name in "abc"}
    interleave(actions, rounds=3, clock=ScriptedClock([1.0] * 9))
    assert "".join(calls) == "abc" + "bca" + "cab"


def test_a_slow_minute_hits_all_contestants_alike() -> None:
    # a takes 1 and b takes 2, but the machine is ten times slower in rounds 1 and 2 of 0 to 4.
    # Order of calls: ab, ba, ab, ba, ab.
    times = [1.0, 2.0, 20.0, 10.0, 10.0, 20.0, 2.0, 1.0, 1.0, 2.0]
    actions: dict[str, Action] = {"a": lambda: None, "b": lambda: None}
    found = interleave(actions, rounds=5, clock=ScriptedClock(times))
    # a: 1 10 10 1 1, sorted 1 1 1 10 10; b twice that
    assert found == {"a": Timing(1.0, 1.0, 10.0), "b": Timing(2.0, 2.0, 20.0)}


def test_quartiles_lie_on_the_line_between_neighbours() -> None:
    # Places 0.75, 1.5 and 2.25 of the sorted samples 1, 2, 4, 8.
    assert timing([8.0, 1.0, 4.0, 2.0]) == Timing(3.0, 1.75, 5.0)


def test_one_round_has_no_quartiles() -> None:
    with pytest.raises(UserError, match="repeat=1"):
        interleave({"a": lambda: None}, rounds=1, clock=HostClock())


def test_the_host_clock_counts_milliseconds() -> None:
    short, long = torch.ones(8, 8), torch.ones(700, 700)
    clock = HostClock()
    clock.measure(lambda: long @ long)
    assert 0 < clock.measure(lambda: short + short) < clock.measure(lambda: long @ long) < 10_000


def test_a_cpu_tells_no_peak_memory() -> None:
    assert extra_memory(lambda: None, torch.device("cpu")) is None


def test_a_replay_keeps_alive_what_its_graph_reads() -> None:
    layer = torch.nn.Linear(2, 2)
    seen = weakref.ref(layer)
    replayed: list[int] = []
    graph = SimpleNamespace(replay=lambda: replayed.append(1))
    replay = Replay(graph, partial(layer, torch.ones(1, 2)))  # type: ignore[arg-type]
    del layer
    gc.collect()
    replay()
    assert replayed == [1] and seen() is not None
    del replay
    gc.collect()
    assert seen() is None
