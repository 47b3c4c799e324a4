"""Which implementation runs, and why: chosen once per kind of call, and said aloud.

    ACMOE_BACKEND=auto        the fastest that can: triton, grouped_mm, torch, in this order
    ACMOE_BACKEND=NAME        that one where it can, else the next of the list, with one log line

torch is the plain reference and can do everything; it is what a CPU gets. triton includes kernels
in its lower language, Gluon, which run wherever they can: ops/device/hopper.py.
"""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.errors import UserError

BACKENDS = ("auto", "torch", "grouped_mm", "triton", "sonicmoe")
_log = logging.getLogger("acmoe")
_said: set[str] = set()


def _checked(name: str) -> str:
    if name not in BACKENDS:
        raise UserError(f"ACMOE_BACKEND={name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    return name


_requested: list[str] = []  # the innermost `use_backend`, if any


def requested() -> str:
    """What the caller or the environment asks for."""
    return _requested[-1] if _requested else _checked(os.environ.get("ACMOE_BACKEND", "auto"))


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Ask for a backend inside `with`, as ACMOE_BACKEND does for a whole process."""
    _requested.append(_checked(name))
    try:
        yield
    finally:
        _requested.pop()


class Option(NamedTuple):
    """One implementation, and what keeps it from serving this call (None: nothing)."""

    name: str
    obstacle: str | None


def choose(op: str, options: Sequence[Option]) -> str:
    """The first option that can, beginning with the one asked for."""
    wanted = requested()
    order = sorted(options, key=lambda option: option.name != wanted)
    found = next(option for option in order if option.obstacle is None)
    if not torch.compiler.is_compiling():
        _say(op, wanted, found.name, order)
    return found.name


def _say(op: str, wanted: str, found: str, order: Sequence[Option]) -> None:
    refused = order[0] if order[0].name == wanted and order[0].name != found else None
    if refused is None:
        say_once(f"{op} runs on {found}")
    else:
        line = f"{op}: {wanted} cannot, {refused.obstacle}; running on {found}"
        say_once(line, logging.WARNING)


def say_once(line: str, level: int = logging.INFO) -> None:
    if line not in _said:
        _said.add(line)
        _log.log(level, line)


# Looked up once, here, so that `torch.compile` finds constants where a call chooses.
_present = {name: importlib.util.find_spec(name) is not None for name in ("triton", "sonicmoe")}


def interpreting() -> bool:
    """Triton's interpreter runs kernels on the CPU: for tests, not for speed."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_obstacle(x: Tensor) -> str | None:
    if not _present["triton"]:
        return "triton is not installed"
    if x.device.type != "cuda" and not interpreting():
        return f"its kernels need a CUDA device, not {x.device.type}"
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "its kernels need compute capability 8.0 or newer"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its kernels have no {x.dtype}"
    return None


def grouped_mm_obstacle(x: Tensor, *widths: int) -> str | None:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return "this torch has no grouped_mm; 2.10 is the first"
    if x.device.type != "cuda":
        return f"on {x.device.type} it is slower than a product per expert"
    if x.dtype != torch.bfloat16:
        return f"it takes bfloat16 on this device, not {x.dtype}"
    if any(width * x.element_size() % 16 for width in widths):
        return f"it needs rows of a multiple of 16 bytes, not widths {widths}"
    return None


def sonicmoe_obstacle(x: Tensor, activation: str, bias: bool, dropout: float) -> str | None:
    if not _present["sonicmoe"]:
        return "sonicmoe is not installed"
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 or fp16 on CUDA, not {x.dtype} on {x.device.type}"
    if activation != "swiglu" or bias or dropout:
        return f"it has swiglu without bias and dropout, not {activation} with them"
    return None
