"""Choose the device, precision and random seed of a run."""

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from acmoe.config.updates import Precision, check_device
from acmoe.errors import check

GPUS = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}  # in the order in which `auto` looks for one


def pick_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is the GPU if there is one.

    A GPU of NVIDIA or, by torch's ROCm build, of AMD is `cuda`, one of Intel `xpu`, of Apple `mps`.
    """
    check_device(name)
    if name == "auto":
        name = next((kind for kind in GPUS if count_devices(kind)), "cpu")
        _log_choice(name)
    device = torch.device(name)
    if device.type in GPUS:
        count = count_devices(device.type)
        check(
            (device.index or 0) < count,
            f"device={name}, but torch finds {count} {GPUS[device.type]} devices; use device=cpu",
        )
    return device


def count_devices(kind: str) -> int:
    """Return the number of GPUs of a kind (a key of GPUS) that torch can use."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = torch.cuda if kind == "cuda" else torch.xpu
    return module.device_count() if module.is_available() else 0


@functools.cache
def _log_choice(name: str) -> None:
    logging.getLogger("acmoe").info("device=auto is %s", name)


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return a context in which matrix products run in bfloat16 if `precision` is bf16."""
    enabled = precision == "bf16"
    if enabled and device.type == "mps":
        check(
            torch.backends.mps.is_macos_or_newer(14, 0),
            "precision=bf16 on device=mps needs macOS 14 or newer; use precision=fp32",
        )
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
    with keeping_rng(device):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def keeping_rng(device: torch.device) -> Iterator[None]:
    """Restore the random generators of the CPU and the device at the end of `with`."""
    states = rng_states(device)
    try:
        yield
    finally:
        set_rng_states(states, device)


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the CPU's and the device's global random generator, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    elif device.type in GPUS:
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore what `rng_states` returned; the state of another type of device is ignored."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cpu" or device.type not in states:
        return
    if device.type == "mps":
        torch.mps.set_rng_state(states["mps"])
    else:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


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
