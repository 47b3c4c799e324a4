"""The functions of the C sources, with their signatures, and when they may serve a call."""

import ctypes
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled
from torch.autograd.profiler import record_function

from acmoe.config.environment import native_requested
from acmoe.errors import UserError
from acmoe.ops.dispatch import eager, log_once
from acmoe.ops.native.build import BuildError, build

SERVED = 0  # return value of a function that has served the call

_profiling = torch._C._autograd._profiler_enabled

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "statistics": (_P, _P, _I, _I, _I, ctypes.c_int, _P, _P, _P, _P, _I, _P, _F, _F, _I),
    "prefix_scale": (*[_P] * 3, *[_I] * 4, ctypes.c_int, *[_P] * 5, *[_F] * 3, _I, *[_P] * 4),
    "theorem_weights": (_P, _P, _I, _I, ctypes.c_int, _F, _P),
    "sort_rows": (_P, _I, _I, _P, _P, _P, _P),
    "route": (*[_P] * 5, *[_I] * 5, ctypes.c_int, _F, _F, *[_P] * 7),
    "route_backward": (*[_P] * 4, *[_I] * 4, ctypes.c_int, _F, _F, *[_P] * 12),
    "rows_times_weights": (_P, _P, _I, _P, _P, _P, _I, _I, _I, _I, ctypes.c_int, _P),
    "combine": (_P, _P, _P, _I, _I, _I, _P),
    "swiglu": (_P, _I, _I, _P),
    "swiglu_backward": (_P, _P, _I, _I, _P),
    "rows_through_weights": (_P, _P, _P, _P, _I, _I, _I, _I, _P),
    "outer_of_rows": (_P, _P, _P, _I, _I, _I, _I, _P, _P),
    "combine_backward": (_P, _P, _P, _P, _I, _I, _I, _P, _P),
}


class Functions:
    """The functions of the library by their names, or the reason why there are none."""

    statistics: Callable[..., int]
    prefix_scale: Callable[..., int]
    theorem_weights: Callable[..., int]
    sort_rows: Callable[..., int]
    route: Callable[..., int]
    route_backward: Callable[..., int]
    rows_times_weights: Callable[..., int]
    combine: Callable[..., int]
    swiglu: Callable[..., int]
    swiglu_backward: Callable[..., int]
    rows_through_weights: Callable[..., int]
    outer_of_rows: Callable[..., int]
    combine_backward: Callable[..., int]

    def __init__(self) -> None:
        self.reason: str | None = None
        self.shown: Any = self  # the same functions, with names that profilers show
        try:
            library, shown = build(), SimpleNamespace()
            for name, types in _SIGNATURES.items():
                function = getattr(library, f"acmoe_{name}")
                function.argtypes = types
                function.restype = ctypes.c_int
                setattr(self, name, function)
                setattr(shown, name, _shown(name, function))
            self.shown = shown
        except UserError:  # a value of ACMOE_NATIVE that does not exist
            raise
        # Whatever else fails, the layer runs on other kernels.
        except (BuildError, OSError, RuntimeError, ValueError, AttributeError) as error:
            self.reason = str(error)
            expected = isinstance(error, BuildError) and error.expected
            fix = "install a C compiler or name one in CC; ACMOE_NATIVE=never stops this message"
            log_once(
                f"small calls on a CPU run without C kernels, which is slower: {error}"
                + (f" ({fix})" if native_requested() == "auto" else ""),
                logging.INFO if expected else logging.WARNING,
            )


def _shown(name: str, function: Callable[..., int]) -> Callable[..., int]:
    """Return the function with a name that profilers show."""

    def run(*args: Any) -> int:
        with record_function(f"acmoe::{name} in C"):
            return function(*args)

    return run


_lock = threading.Lock()
_made: list[Functions] = []


def functions() -> Functions:
    """Return the functions; the first call on a machine compiles them, which takes seconds."""
    if not _made:
        with _lock:
            if not _made:
                _made.append(Functions())
    found: Functions = _made[0].shown if _profiling() else _made[0]
    return found


def unsupported(*tensors: Tensor | None) -> str | None:
    """Return the reason why C functions cannot read these float32 tensors, or None.

    Call it before you read any size: a branch on a size would bind a traced graph to that size.
    """
    if not eager(*tensors):
        return "the call is traced or observed"
    for one in tensors:
        if one is None:
            continue
        if not one.is_cpu:
            return "it is for CPUs"
        if one.dtype != torch.float32:
            return "it takes float32"
        if not one.is_contiguous() or one.is_neg() or one.numel() == 0:
            return "it takes contiguous tensors that are not empty"
    return "under autocast its products would be narrow" if is_autocast_enabled("cpu") else None


def unsupported_ids(*tensors: Tensor | None) -> str | None:
    """Return the reason why C functions cannot read these int64 tensors, or None."""
    for one in tensors:
        if one is None:
            continue
        if type(one) is not Tensor or not one.is_cpu:
            return "it takes ids on a CPU"
        if one.dtype != torch.int64 or not one.is_contiguous():
            return "it takes contiguous int64 ids"
    return None


def missing() -> str | None:
    """Return the reason why there is no library, or None; it is compiled where it is missing."""
    if not _made:
        functions()
    return _made[0].reason


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
