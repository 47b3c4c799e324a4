"""Barriers of an emulated Gluon kernel, with phases as on the card."""

from collections.abc import Callable
from typing import Any

from gluon_memory import Shared
from gluon_program import here, step, wait_until
from gluon_values import emulates


class Barrier:
    """An mbarrier: a phase ends when its arrivals and its expected bytes are all there."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.missing = name, count, count
        self.bytes, self.phase = 0, 0
        self.in_flight: list[Callable[[], None]] = []

    def finish(self) -> None:
        if self.in_flight:
            raise RuntimeError(f"{self.name} ends with copies in flight: mbarrier.wait is missing")

    def arrive(self, count: int = 1, received: int = 0) -> None:
        self.missing -= count
        self.bytes -= received
        if self.missing < 0:
            raise RuntimeError(f"{self.name} got more arrivals than its count of {self.count}")
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        """Has the phase of this parity ended? A wait for it is what lets its copies land."""
        while self.phase % 2 == parity and self.in_flight:
            self.in_flight.pop(0)()
        return self.phase % 2 != parity


def barrier_at(shared: Shared) -> Barrier:
    at = int(shared.address.reshape(-1)[0])
    if at not in shared.memory.barriers:
        raise RuntimeError("an mbarrier is used before mbarrier.init")
    return shared.memory.barriers[at]


@emulates("mbarrier.init")
def init_barrier(shared: Shared, count: int) -> None:
    at = int(shared.address.reshape(-1)[0])
    number = here().program.memories.index(shared.memory)
    shared.memory.barriers[at] = Barrier(f"barrier {at} of allocation {number}", int(count))


@emulates("mbarrier.invalidate")
def invalidate_barrier(shared: Shared) -> None:
    barrier_at(shared).finish()
    del shared.memory.barriers[int(shared.address.reshape(-1)[0])]


@emulates("mbarrier.expect")
def expect(shared: Shared, bytes_per_cta: Any = None, pred: Any = True, *, bytes: int = 0) -> None:
    """Arrives once, and makes the phase wait for the bytes (named differently by two versions)."""
    if pred:
        barrier_at(shared).bytes += int(bytes if bytes_per_cta is None else bytes_per_cta)
        barrier_at(shared).arrive()
    step()


@emulates("mbarrier.arrive")
def arrive(shared: Shared, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier_at(shared).arrive(int(count))
    step()


@emulates("mbarrier.wait")
def wait(shared: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        barrier, parity = barrier_at(shared), int(phase)
        what = f"phase {parity} of {barrier.name} ({barrier.missing} arrivals missing)"
        wait_until(lambda: barrier.passed(parity), what)
