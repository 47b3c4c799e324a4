"""The code and the machine behind a figure: commit, device and command."""

import functools
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch


def code_commit() -> str | None:
    """Return the commit of the checkout that holds this package; None for an installed package.

    The environment variable ACMOE_COMMIT names the commit of a copy without history.
    """
    return os.environ.get("ACMOE_COMMIT") or _checkout_commit()


@functools.cache
def _checkout_commit() -> str | None:
    """Ask git once per process: the code is in memory, whatever becomes of the checkout."""
    root = Path(__file__).parents[3]  # src/acmoe/evaluate
    if not (root / ".git").exists():
        return None  # installed; git would find another project's checkout around the environment
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, or the kind of processor."""
    if device.type in ("cuda", "xpu"):
        return str(torch.get_device_module(device).get_device_name(device))
    return platform.processor() or platform.machine()


def command_line() -> str:
    """Return the command that started this process, ready for a shell.

    A process that multiprocessing has spawned has the command of its parent.
    """
    program, *arguments = sys.argv or [""]
    if program in ("", "-c"):
        return "python (interactive)" if not program else "python -c ..."
    path = Path(program)
    own = path.stem == "acmoe" or (path.name == "__main__.py" and path.parent.name == "acmoe")
    return shlex.join(["acmoe", *arguments] if own else ["python", program, *arguments])
