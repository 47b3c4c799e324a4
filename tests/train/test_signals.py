"""Stop signals end a run after its step, but for those that the process ignores."""

import os
import signal
from collections.abc import Iterator

import pytest

from acmoe.train.signals import STOP, StopSignals


@pytest.fixture(params=STOP)
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A stop signal, whose handler is put back after the test."""
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_is_remembered_and_its_handler_put_back(number: int) -> None:
    caught: list[int] = []
    signal.signal(number, lambda received, frame: caught.append(received))
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received == number and not caught
        os.kill(os.getpid(), number)  # the second one acts at once
        assert caught == [number]


def test_a_signal_that_the_process_ignores_stops_no_run(number: int) -> None:
    # `nohup acmoe train ...` ignores SIGHUP, which comes when its terminal closes.
    signal.signal(number, signal.SIG_IGN)
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received is None
    assert signal.getsignal(number) is signal.SIG_IGN
