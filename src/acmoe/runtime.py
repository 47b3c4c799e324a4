"""Where a model runs and in which precision."""

import contextlib
import functools
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from acmoe.config.updates import Precision, check_device
from acmoe.errors import check


def pick_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is the GPU if there is one."""
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        check(
            (device.index or 0) < count,
            f"device={name}, but torch finds {count} CUDA devices; use device=cpu",
        )
    return device


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return a context in which matrix products run in bfloat16 if `precision` is bf16."""
    enabled = precision == "bf16"
    if enabled and device.type == "cpu":
        _settle_bf16_gemm()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


@functools.cache
def _settle_bf16_gemm() -> None:
    """Let torch choose its bfloat16 GEMM on this CPU now, without the warning it gives.

    On a CPU without bfloat16 instructions (many ARM cores) the first large product of a process
    fails in oneDNN. torch warns, switches oneDNN off for the whole process, and computes the
    product with BLAS. The result is right, so the warning would only be noise. One product here
    brings this about before the first step, so that oneDNN is either on or off in all steps.
    """
    weight = torch.ones(64, 64, dtype=torch.bfloat16)  # torch asks oneDNN above 16 x 16 x 16
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
        torch.nn.functional.linear(weight, weight)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random generators inside `with`, and restore their states afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside `with`; then restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
