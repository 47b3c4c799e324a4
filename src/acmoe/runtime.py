"""Where a model runs and in which precision."""

import contextlib
from collections.abc import Iterator

import torch

from acmoe.config.text.train import Precision
from acmoe.config.updates import check_device
from acmoe.errors import check


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
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
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a fresh random stream inside `with`; the caller's goes on as if nothing was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
