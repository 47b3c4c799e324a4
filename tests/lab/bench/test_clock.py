"""Timing: who runs when, and what is made of the samples."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from acmoe.errors import UserError
from acmoe.lab.bench.harness.clock import (
    Action,
    HostClock,
    Replay,
    Timing,
    extra_memory,
    interleave,
    timing,
    timings,
)


class ScriptedClock:
    """Runs the action, and reads the next of the given times."""

    def __init__(self, times: list[float]) -> None:
        self.times: Iterator[float] = iter(times)

    def measure(self, action: Action) -> float:
        action()
        return next(self.times)


class HotClock:
    """A card that slows down: a call takes what its action returns times the round's factor."""

    def __init__(self, factors: list[float], actions: int) -> None:
        self.factors = iter([factor for factor in factors for _ in range(actions)])

    def measure(self, action: Action) -> float:
        return next(self.factors) * action()  # type: ignore[operator]


def test_every_round_runs_each_action_once_and_none_has_a_place_of_its_own() -> None:
    calls: list[str] = []
    actions: dict[str, Action] = {name: lambda name=name: calls.append(name) for name in "abcd"}
    interleave(actions, rounds=60, clock=ScriptedClock([1.0] * 240))
    rounds = ["".join(calls[at : at + 4]) for at in range(0, 240, 4)]
    assert {"".join(sorted(one)) for one in rounds} == {"abcd"}
    before = Counter(pairwise(calls))
    # Each follows each other one in about a quarter to a third of 60 rounds, none in all of them.
    follow = [before[one, other] for one in "abcd" for other in "abcd" if one != other]
    assert min(follow) >= 5 and max(follow) <= 35


def test_orders_are_the_same_in_every_run() -> None:
    def once() -> list[str]:
        calls: list[str] = []
        actions: dict[str, Action] = {name: lambda name=name: calls.append(name) for name in "abc"}
        interleave(actions, rounds=8, clock=ScriptedClock([1.0] * 24))
        return calls

    assert once() == once()


def test_a_slow_minute_hits_all_contestants_alike() -> None:
    actions: dict[str, Action] = {"a": lambda: 1.0, "b": lambda: 2.0}
    found = interleave(actions, rounds=5, clock=HotClock([1.0, 10.0, 10.0, 1.0, 1.0], 2))
    assert found == {"a": [1.0, 10.0, 10.0, 1.0, 1.0], "b": [2.0, 20.0, 20.0, 2.0, 2.0]}
    assert timings(found) == {"a": Timing(1.0, 1.0, 10.0), "b": Timing(2.0, 2.0, 20.0)}


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
