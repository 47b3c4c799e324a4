"""The memory of a tape: one small buffer, and large ones from their first launch to their last."""

import weakref
from typing import Any

import pytest
import torch
from tape_cases import calls, launch, pair
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from acmoe.ops.device import recording, tape
from acmoe.ops.device.tape import taped

pytestmark = pytest.mark.usefixtures("simulated_launches")

used: list[StorageWeakRef] = []  # by `through_large_memory`


@pytest.mark.parametrize("found", [None, tape._compiled_allocator("cpu")])
def test_memory_has_the_shape_that_is_asked_for(
    found: tape.Allocator | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape, "_compiled_allocator", lambda kind: found)
    made = tape.allocator(torch.device("cpu"))((2, 3), (3, 1), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.bfloat16)
    assert tape.allocator(torch.device("meta"))((2, 3), (3, 1), torch.int64).is_meta


def through_large_memory(x: Tensor, y: Tensor) -> tuple[Tensor]:
    """Return 8 * (x + y) by way of three buffers, of which two are needed at a time."""
    for _ in range(3):
        between = torch.empty(8)
        used.append(StorageWeakRef(between.untyped_storage()))
        launch(x, y, between, 8)
        x = y = between
    out = torch.empty(8)
    launch(x, y, out, 8)
    return (out,)


def test_large_memory_is_held_from_its_first_launch_to_its_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []  # tensors of the tape that exist, each time that it allocates one
    made: list[weakref.ref[Tensor]] = []

    def empty(*layout: Any) -> Tensor:
        found = torch.empty_strided(layout[0], layout[1], dtype=layout[2])
        made.append(weakref.ref(found))
        held.append(sum(one() is not None for one in made))
        return found

    monkeypatch.setattr(recording, "LARGE_BYTES", 32)  # as large as each buffer
    monkeypatch.setattr(tape, "allocator", lambda device: empty)
    x, y = pair(0)
    taped(through_large_memory, (x, y), ())
    assert not made
    assert torch.equal(taped(through_large_memory, (x, y), ())[0], 8 * (x + y))
    assert held == [1, 2, 2, 2] and len(calls) == 4


def test_small_memory_is_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def empty(*layout: Any) -> Tensor:
        made.append(layout)
        return torch.empty_strided(layout[0], layout[1], dtype=layout[2])

    monkeypatch.setattr(tape, "allocator", lambda device: empty)
    x, y = pair(0)
    for _ in range(2):
        assert torch.equal(taped(through_large_memory, (x, y), ())[0], 8 * (x + y))
    # Three buffers of 32 bytes, each at a multiple of 256.
    assert made == [((768,), (1,), torch.uint8), ((8,), (1,), torch.float32)]


def test_a_recorded_call_frees_its_memory_as_any_other() -> None:
    used.clear()

    def watched(x: Tensor, y: Tensor) -> tuple[Tensor]:
        found = through_large_memory(x, y)
        assert all(one.expired() for one in used)
        return found

    taped(watched, pair(0), ())
    assert len(used) == 3 and next(iter(tape._tapes.values())) is not None
