"""The function that repeats a tape passes every argument that the recorded call passed."""

from types import SimpleNamespace
from typing import Any

import torch

from acmoe.ops.device.playback import write_play
from acmoe.ops.device.recording import Pointer, Step, Steps


def test_addresses_are_those_of_the_call_and_all_else_is_as_recorded() -> None:
    """Slots 0 and 1 are given, 2 is the result, 3 is 256 bytes after the buffer's begin."""
    launched: list[tuple[Any, ...]] = []
    made: list[torch.Tensor] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty_strided(shape, strides, dtype=dtype))
        return made[-1]

    described = SimpleNamespace(at=lambda address: ("descriptor", address))
    values = [Pointer(0, 0), Pointer(1, 64), described, Pointer(2, 0), 8, 0.5, None, True]
    step = Step(
        made=((2, ((8, 4), (4, 1), torch.float32)),),
        run=lambda *arguments: launched.append(arguments),
        head=(3, 2, 1, "function", "metadata"),
        values=values,
        pointers=((0, 0, 0), (1, 1, 64), (3, 2, 0)),
        described=((2, 4, 256, described),),  # type: ignore[arg-type]
        freed=(),
    )
    play = write_play(Steps((step,), num_slots=4, num_bytes=512, order=(2,)), 2, empty)
    (result,) = play((None, None), [1000, 2000], 7)
    buffer, second = made
    assert result is second and (result.shape, result.dtype) == ((8, 4), torch.float32)
    assert (buffer.shape, buffer.dtype) == ((512,), torch.uint8)
    ((*grid, stream, function, metadata, a, b, c), arguments) = launched[0][:9], launched[0][9:]
    assert (grid, stream, function, metadata) == ([3, 2, 1], 7, "function", "metadata")
    assert (a, b, c) == (None, None, None)  # no hook of Triton is called
    at = ("descriptor", buffer.data_ptr() + 256)
    assert arguments == (1000, 2064, at, result.data_ptr(), 8, 0.5, None, True)
