"""mbarriers of an emulated Gluon kernel, with arrival counts, expected bytes and phases."""

from collections.abc import Callable
from typing import Any

from gluon_memory import Shared
from gluon_program import current_partition, wait_until, yield_point
from gluon_values import emulates


class Barrier:
    """An mbarrier: a phase completes when all its arrivals and expected bytes have come.

    in_flight holds the asynchronous copies that will arrive here; they complete only when somebody
    waits for the barrier, which is as late as the hardware may complete them.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.missing = name, count, count
        self.bytes, self.phase = 0, 0
        self.in_flight: list[Callable[[], None]] = []

    def check_done(self) -> None:
        """Raise if copies are in flight that nobody waited for."""
        if self.in_flight:
            raise RuntimeError(f"{self.name} ends with copies in flight: mbarrier.wait is missing")

    def arrive(self, count: int = 1, received: int = 0) -> None:
        """Count arrivals and received bytes; start the next phase when none is missing."""
        self.missing -= count
        self.bytes -= received
        if self.missing < 0:
            raise RuntimeError(f"{self.name} got more arrivals than its count of {self.count}")
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        """Complete copies in flight as needed; return True if the phase of this parity is over."""
        while self.phase % 2 == parity and self.in_flight:
            self.in_flight.pop(0)()
        return self.phase % 2 != parity


def barrier_at(shared: Shared) -> Barrier:
    """Return the barrier at the address of a shared-memory descriptor."""
    address = int(shared.address.reshape(-1)[0])
    if address not in shared.allocation.barriers:
        raise RuntimeError("an mbarrier is used before mbarrier.init")
    return shared.allocation.barriers[address]


@emulates("mbarrier.init")
def init_barrier(shared: Shared, count: int) -> None:
    address = int(shared.address.reshape(-1)[0])
    number = current_partition().program.allocations.index(shared.allocation)
    shared.allocation.barriers[address] = Barrier(
        f"barrier {address} of allocation {number}", int(count)
    )


@emulates("mbarrier.invalidate")
def invalidate_barrier(shared: Shared) -> None:
    barrier_at(shared).check_done()
    del shared.allocation.barriers[int(shared.address.reshape(-1)[0])]


@emulates("mbarrier.expect")
def expect(shared: Shared, bytes_per_cta: Any = None, pred: Any = True, *, bytes: int = 0) -> None:
    """Arrive once and expect so many bytes (the argument has two names in versions of Triton)."""
    if pred:
        barrier_at(shared).bytes += int(bytes if bytes_per_cta is None else bytes_per_cta)
        barrier_at(shared).arrive()
    yield_point()


@emulates("mbarrier.arrive")
def arrive(shared: Shared, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier_at(shared).arrive(int(count))
    yield_point()


@emulates("mbarrier.wait")
def wait(shared: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        barrier, parity = barrier_at(shared), int(phase)
        what = f"phase {parity} of {barrier.name} ({barrier.missing} arrivals missing)"
        wait_until(lambda: barrier.passed(parity), what)
