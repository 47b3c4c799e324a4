"""Repeat recorded launches (device/tape.py); that module imports Triton, so it is loaded late.

An `import` inside the functions that need it would take 2 us of the host in every call, even if the
module is loaded already.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

_loaded: list[Callable[..., tuple[Tensor, ...]]] = []  # `taped` of device/tape.py, once needed


def taped(
    run: Callable[..., tuple[Tensor, ...]],
    tensors: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """Return run(*tensors, *settings), by a tape where there is one (`device.tape.taped`)."""
    if not _loaded:
        from acmoe.ops.device import tape

        _loaded.append(tape.taped)
    return _loaded[0](run, tensors, settings)
