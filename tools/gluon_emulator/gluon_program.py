"""One program of an emulated Gluon kernel: its partitions as threads of which one runs at a time.

Every operation that others could notice is a point where another partition may go on; a seed picks
which, so that a run is repeatable, and how much faster some partitions are than others, so that a
missing barrier shows under some seed.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

_running = threading.local()


class Deadlock(RuntimeError):  # noqa: N818
    """Every partition waits; the message names each and its barrier."""


class _Stopped(BaseException):
    """Unwinds a partition after another one failed."""


class Partition:
    """A group of warps and what it has in flight."""

    def __init__(self, program: "Program", name: str, num_warps: int) -> None:
        self.program, self.name, self.num_warps = program, name, num_warps
        self.copies: list[Callable[[], None]] = []  # cp.async of no group yet
        self.groups: list[list[Callable[[], None]]] = []
        self.products: list[Callable[[], None]] = []  # wgmma
        self.stores: list[Callable[[], None]] = []  # TMA, shared to global
        self.speed = program.random.choice((1, 4, 64))
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = "its start"

    def finish(self) -> None:
        """Refuses what must not be in flight when a partition ends."""
        if self.products:
            raise RuntimeError(
                f"{self.name} ends with wgmma in flight: warpgroup_mma_wait is missing"
            )
        if self.stores:
            raise RuntimeError(
                f"{self.name} ends with a TMA store in flight: store_wait is missing"
            )


class Program:
    """One program of the grid."""

    def __init__(self, index: tuple[int, ...], grid: tuple[int, ...], num_warps: int, seed: int):
        self.index, self.grid = index, grid
        self.random = random.Random(seed)
        self.main = Partition(self, "the default partition", num_warps)
        self.live = [self.main]
        self.memories: list[Any] = []
        self.failure: BaseException | None = None

    def run(self, function: Callable[[], Any]) -> None:
        _running.partition = self.main
        function()
        self.main.finish()
        for memory in self.memories:
            memory.finish()

    def switch(self, me: Partition, ready: Callable[[], bool], waits_for: str) -> None:
        """Lets some partition that can go on do so; returns when `me` is picked."""
        me.ready, me.waits_for = ready, waits_for
        chosen = self._choose()
        if chosen is not me and self.failure is None:
            chosen.go.release()
            me.go.acquire()
        if self.failure is not None:
            raise _Stopped

    def _choose(self) -> Partition:
        able = [partition for partition in self.live if partition.ready()]
        if not able:
            waits = "; ".join(
                f"{partition.name} waits for {partition.waits_for}" for partition in self.live
            )
            self._fail(Deadlock(f"program {self.index}: {waits}"))
            return self.main
        return self.random.choices(able, [partition.speed for partition in able])[0]

    def _fail(self, failure: BaseException) -> None:
        """Keeps the first failure; the default partition wakes to stop the others."""
        if self.failure is None:
            self.failure = failure
            if here() is not self.main:
                self.main.go.release()

    def _work(self, me: Partition, function: Callable[..., Any], arguments: Any) -> None:
        _running.partition = me
        me.go.acquire()
        try:
            if self.failure is None:
                function(*arguments)
                me.finish()
        except _Stopped:
            pass
        except BaseException as failure:
            self._fail(failure)
        self.live.remove(me)
        if self.failure is None:
            chosen = self._choose()
            if self.failure is None:
                chosen.go.release()

    def specialize(self, parts: Any, worker_num_warps: Any) -> Any:
        """Runs parts[0] here, whose result it returns, and every other part in a worker."""
        workers = []
        for number, (function, _) in enumerate(parts[1:], 1):
            name = f"partition {number} ({function.__name__})"
            workers.append(Partition(self, name, worker_num_warps[number - 1]))
        threads = [
            threading.Thread(target=self._work, args=(worker, *part), daemon=True)
            for worker, part in zip(workers, parts[1:], strict=True)
        ]
        self.live += workers
        for thread in threads:
            thread.start()
        try:
            result = parts[0][0](*parts[0][1])
            self.switch(self.main, lambda: self.live == [self.main], "the worker partitions")
            return result
        except _Stopped:
            raise self.failure from None
        except BaseException as failure:
            self._fail(failure)
            raise
        finally:
            for worker, thread in zip(workers, threads, strict=True):
                worker.go.release()
                thread.join()


def here() -> Partition:
    """The partition that runs."""
    return _running.partition


def step() -> None:
    """A point where another partition may go on."""
    wait_until(lambda: True, "")


def wait_until(ready: Callable[[], bool], waits_for: str) -> None:
    me = here()
    try:
        me.program.switch(me, ready, waits_for)
    except _Stopped:
        if len(me.program.live) == 1:  # not inside warp_specialize: nobody else reports it
            raise me.program.failure from None
        raise
