"""Scheduler of one program of an emulated Gluon kernel: its partitions are threads that take turns.

A partition is a group of warps with a role of its own (`gl.warp_specialize`). Exactly one thread
runs at a time. Every operation that another partition could observe is a yield point, at which the
scheduler may continue another partition. A seed determines which one, so that a run is repeatable,
and how much faster some partitions are than others, so that a missing barrier shows under some
seed.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

_running = threading.local()


class Deadlock(RuntimeError):  # noqa: N818
    """Every partition waits; the message names each partition and its barrier."""


class _Stopped(BaseException):
    """Raised in a partition to unwind it after another one has failed."""


class Partition:
    """A group of warps, and its asynchronous operations in flight."""

    def __init__(self, program: "Program", name: str, num_warps: int) -> None:
        self.program, self.name, self.num_warps = program, name, num_warps
        self.copies: list[Callable[[], None]] = []  # cp.async that are not committed to a group yet
        self.groups: list[list[Callable[[], None]]] = []
        self.mmas: list[Callable[[], None]] = []  # wgmma
        self.stores: list[Callable[[], None]] = []  # TMA, shared to global
        self.speed = program.random.choice((1, 4, 64))
        self.resume = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = "its start"

    def check_done(self) -> None:
        """Raise if an operation is in flight that must be waited for before a partition ends."""
        if self.mmas:
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
        self.allocations: list[Any] = []
        self.failure: BaseException | None = None

    def run(self, function: Callable[[], Any]) -> None:
        """Run the kernel's function; raise if it ends with an operation in flight."""
        _running.partition = self.main
        function()
        self.main.check_done()
        for allocation in self.allocations:
            allocation.check_done()

    def switch(self, me: Partition, ready: Callable[[], bool], waits_for: str) -> None:
        """Continue some partition that is ready; return when `me` is picked."""
        me.ready, me.waits_for = ready, waits_for
        chosen = self._pick()
        if chosen is not me and self.failure is None:
            chosen.resume.release()
            me.resume.acquire()
        if self.failure is not None:
            raise _Stopped

    def _pick(self) -> Partition:
        """Pick a ready partition at random, weighted by speed; record a deadlock if none is."""
        runnable = [partition for partition in self.live if partition.ready()]
        if not runnable:
            waits = "; ".join(
                f"{partition.name} waits for {partition.waits_for}" for partition in self.live
            )
            self._fail(Deadlock(f"program {self.index}: {waits}"))
            return self.main
        return self.random.choices(runnable, [partition.speed for partition in runnable])[0]

    def _fail(self, failure: BaseException) -> None:
        """Record the first failure, and wake the default partition, which stops the others."""
        if self.failure is None:
            self.failure = failure
            if current_partition() is not self.main:
                self.main.resume.release()

    def _run_worker(self, me: Partition, function: Callable[..., Any], arguments: Any) -> None:
        """Body of a worker partition's thread."""
        _running.partition = me
        me.resume.acquire()
        try:
            if self.failure is None:
                function(*arguments)
                me.check_done()
        except _Stopped:
            pass
        except BaseException as failure:
            self._fail(failure)
        self.live.remove(me)
        if self.failure is None:
            chosen = self._pick()
            if self.failure is None:
                chosen.resume.release()

    def specialize(self, parts: Any, worker_num_warps: Any) -> Any:
        """Run parts[0] in this thread and return its result; run the other parts in workers."""
        workers = []
        for number, (function, _) in enumerate(parts[1:], 1):
            name = f"partition {number} ({function.__name__})"
            workers.append(Partition(self, name, worker_num_warps[number - 1]))
        threads = [
            threading.Thread(target=self._run_worker, args=(worker, *part), daemon=True)
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
                worker.resume.release()
                thread.join()


def current_partition() -> Partition:
    """Return the partition whose thread this is."""
    return _running.partition


def yield_point() -> None:
    """Let the scheduler continue another partition."""
    wait_until(lambda: True, "")


def wait_until(ready: Callable[[], bool], waits_for: str) -> None:
    """Wait until ready() is true, while other partitions run; waits_for names it in a deadlock."""
    me = current_partition()
    try:
        me.program.switch(me, ready, waits_for)
    except _Stopped:
        if len(me.program.live) == 1:  # not inside warp_specialize: no other frame reports it
            raise me.program.failure from None
        raise
