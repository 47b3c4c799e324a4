"""The functions of the C sources, with their signatures, and when they may serve a call."""

import ctypes
import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor, is_autocast_enabled

from acmoe.ops.dispatch import eager, log_once, transforming
from acmoe.ops.native.build import BuildError, build

SERVED = 0  # what a function returns if it has served the call

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "statistics": (_P, _P, _I, _I, _I, ctypes.c_int, _P, _P, _P, _P, _I, _P, _F, _F, _I),
    "sort_rows": (_P, _I, _I, _P, _P, _P, _P),
    "route": (*[_P] * 5, *[_I] * 5, ctypes.c_int, _F, _F, *[_P] * 7),
    "route_backward": (*[_P] * 4, *[_I] * 4, ctypes.c_int, _F, _F, *[_P] * 12),
    "rows_times_weights": (_P, _P, _I, _P, _P, _P, _I, _I, _I, ctypes.c_int, _P),
    "combine": (_P, _P, _P, _I, _I, _I, _P),
}


class Functions:
    """The functions of the library by their names, or the reason why there are none."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._found: dict[str, Callable[..., int]] = {}
        try:
            library = build()
        except BuildError as error:
            self.reason = str(error)
            level = logging.INFO if error.expected else logging.WARNING
            log_once(f"the C kernels of small calls on a CPU do not run: {error}", level)
            return
        for name, types in _SIGNATURES.items():
            function = getattr(library, f"acmoe_{name}")
            function.argtypes = types
            function.restype = ctypes.c_int
            self._found[name] = function

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in _SIGNATURES:
            raise AttributeError(name)
        return self._found[name]


@functools.cache
def functions() -> Functions:
    """Return the functions; the first call on a machine compiles them, which takes seconds."""
    return Functions()


def unsupported(*tensors: Tensor | None) -> str | None:
    """Return the reason why C functions cannot read these float32 tensors, or None.

    It must be asked before any size is: a traced branch would bind the graph to one.
    """
    if not eager(*tensors) or transforming():
        return "it is traced, or watched"
    for one in tensors:
        if one is None:
            continue
        if not one.is_cpu:
            return "it is for CPUs"
        if one.dtype != torch.float32:
            return "it takes float32"
        if not one.is_contiguous() or one.numel() == 0:
            return "it takes contiguous tensors that are not empty"
    return "under autocast its products would be narrow" if is_autocast_enabled("cpu") else None


def missing() -> str | None:
    """Return the reason why there is no library, or None; it is compiled where it is missing."""
    return functions().reason


def unsupported_size(number: int, most: int, what: str) -> str | None:
    """Return the reason why a call of this size is left to torch, or None.

    Calls that C serves need the library, which is compiled when the first of them comes.
    """
    if number > most:
        return f"it takes up to {most:,} {what}, in one thread"
    return missing()


def pointer(one: Tensor | None) -> int | None:
    """Return the address of the first element; None for NULL."""
    return None if one is None else one.data_ptr()
