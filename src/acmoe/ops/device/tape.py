"""Repeat the launches of a call with other tensors, which shortens the host's part of small calls.

`taped(run, tensors, settings)` returns run(*tensors, *settings). The first call of a kind records
what `run` allocates and launches (recording.py); later calls of the same kind repeat that
(playback.py): they allocate the results, large memory while it is used, and one buffer for
everything else, and hand addresses to the compiled kernels. So block sizes, grids and flags are
worked out once for each kind of call.

Calls are of one kind if `run`, the settings, the current device, and the shape, dtype and device of
every tensor are equal. A tape is kept only if `run` did nothing but allocate, take views, launch
kernels by `launch` and call torch by `compute`; a dispatch mode and a hook of Triton check this
while it is recorded. Tensors that are not contiguous, or not aligned to 16 bytes, which kernels are
compiled for, are left to `run`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from acmoe.ops.device.launcher import (
    Computation,
    Launch,
    count_launches,
    plain_launches,
    recorder,
)
from acmoe.ops.device.playback import Allocator, Play, write_play
from acmoe.ops.device.recording import Memory, Results, Watch, steps_of

MOST_TAPES = 1024


class Tape(NamedTuple):
    """The recorded steps of a call, and the compiled kernels, which must stay alive."""

    play: Play
    stream: Callable[[int], int]  # returns the current stream of a device
    owners: tuple[Any, ...]


@functools.cache
def _compiled_allocator(kind: str) -> Allocator | None:
    """Return the function by which torch's compiled code allocates; None: it has none for this.

    It takes 1 us where `torch.empty` takes 4 (two ARM cores), and allocates on the current device.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found: Allocator | None = getattr(guards, f"_empty_strided_{kind}", None)
    return found


def allocator(device: torch.device) -> Allocator:
    """Return a function (shape, strides, dtype) -> uninitialised tensor on this device."""
    kind = device.type
    if kind == "cpu" or (kind == "cuda" and device.index == torch.cuda.current_device()):
        found = _compiled_allocator(kind)
        if found is not None:
            return found
    return functools.partial(_empty, device)


def _empty(
    device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


_tapes: dict[tuple[Any, ...], Tape | None] = {}  # None: this kind of call cannot be repeated
_UNKNOWN: Any = object()


def forget() -> None:
    """Drop all tapes, so that block sizes are chosen anew."""
    _tapes.clear()


def taped(
    run: Callable[..., Results], tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...]
) -> Results:
    """Return run(*tensors, *settings), by a tape where there is one.

    No gradient may be recorded, and settings must hold all else that the launches depend on.
    """
    first = tensors[0]
    assert first is not None
    # `torch.cuda.current_device` would check that CUDA is initialised, which a CUDA tensor shows.
    current = torch._C._cuda_getDevice() if first.is_cuda else -1
    kinds: list[Any] = [run, current, settings]
    addresses = []
    together, contiguous = 0, True
    for one in tensors:
        if one is None:
            kinds.append(None)
            addresses.append(0)
            continue
        address = one.data_ptr()
        kinds += (one.shape, one.dtype, one.get_device())
        addresses.append(address)
        together |= address
        contiguous = contiguous and one.is_contiguous()
    key = tuple(kinds)
    tape = _tapes.get(key, _UNKNOWN)
    fit = together & 15 == 0 and contiguous and plain_launches()
    if tape is None or not fit or recorder.steps is not None:
        return run(*tensors, *settings)
    if tape is _UNKNOWN:
        return _record(key, run, tensors, settings)
    return tape.play(tensors, addresses, tape.stream(current))


def _record(
    key: tuple[Any, ...],
    run: Callable[..., Results],
    tensors: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
) -> Results:
    recorded: list[Launch | Computation | None] = []
    recorder.steps, recorder.memory = recorded, Memory(tensors)
    try:
        with Watch() as watch, count_launches() as seen:
            results = run(*tensors, *settings)
        # A kernel that was not launched by `launch` would be missing from the tape.
        launches = [one for one in recorded if not isinstance(one, Computation)]
        complete = watch.only_memory and seen is not None and len(seen) == len(launches)
        steps = steps_of(recorded, recorder.memory, results) if complete else None
    finally:
        recorder.steps = recorder.memory = None
    if len(_tapes) >= MOST_TAPES:
        _tapes.clear()
    _tapes[key] = None
    if steps is not None:
        first = tensors[0]
        assert first is not None
        play = write_play(steps, len(tensors), allocator(first.device))
        owners = tuple(one.compiled.owners for one in launches if one is not None)
        _tapes[key] = Tape(play, driver.active.get_current_stream, owners)
    return results
