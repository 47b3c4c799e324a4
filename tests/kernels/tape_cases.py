"""Kernels for the tests of tapes: Python functions that read and write float32 at addresses.

That is what a GPU does.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from acmoe.ops.device import tape
from acmoe.ops.device.launcher import Compiled, recorder

calls: list[object] = []  # an entry for each launch that was not repeated from a tape


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tapes count and repeat the launches of this file, without a driver of a GPU."""
    driver = SimpleNamespace(
        active=SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    )
    monkeypatch.setattr(tape, "driver", driver)
    monkeypatch.setattr(tape, "plain_launches", lambda: True)
    monkeypatch.setattr(tape, "count_launches", counted)
    calls.clear()
    tape.forget()


@contextlib.contextmanager
def counted() -> Iterator[list[object]]:
    seen: list[object] = []
    before = len(calls)
    yield seen
    seen += calls[before:]


def numbers(address: Tensor | int, count: int) -> Any:
    pointer = address.data_ptr() if isinstance(address, Tensor) else address
    return (ctypes.c_float * count).from_address(pointer)


def add_kernel(*given: Any) -> None:
    """out[i] = left[i] + right[i] for `count` numbers."""
    *_, left, right, out, count = given
    left_, right_, out_ = (numbers(one, count) for one in (left, right, out))
    for i in range(count):
        out_[i] = left_[i] + right_[i]


def launch(*args: Any) -> None:
    """Launch `add_kernel` as acmoe.ops.device.launcher.launch does, and record it."""
    calls.append("launched")
    add_kernel(*args)
    if recorder.steps is not None:
        recorder.add(Compiled(add_kernel, None, None, (), (None, None)), (1,), args)


def twice_plus_tail(x: Tensor, y: Tensor, scale: int = 1) -> tuple[Tensor, Tensor]:
    """Return (x + y) + (x + y), by way of a buffer, and the sum of the halves of y."""
    between = torch.empty(2, 8)
    both, tail = torch.empty(8), x.new_empty(4)
    launch(x, y, between[1], 8)
    launch(between[1], between[1], both, 8)
    launch(y, y[4:], tail, 4)
    return tail, both


def expected(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y[:4] + y[4:], 2 * (x + y)


def pair(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, generator=generator), torch.randn(8, generator=generator)
