"""Try the acmoe that is installed in this environment: a layer, and the command.

    python -I tools/smoke.py

`make dist` runs it on the wheel and on the sdist, each installed in an environment of its own.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import acmoe


def check(right: bool, wrong: str) -> None:
    if not right:
        raise SystemExit(f"smoke test: {wrong}")


def try_layers() -> None:
    """Two adaptive layers forward and backward: the second reads the state of the first."""
    sizes = {"dim": 8, "hidden": 16, "num_experts": 4, "top_k": 2}
    first = acmoe.MoE(**sizes, router="adaptive")
    second = acmoe.MoE(**sizes, router="adaptive")
    y, state = first(torch.randn(5, 8))
    z, state = second(y, state)
    (z.square().mean() + state.aux_loss).backward()
    check(z.shape == (5, 8), f"a layer made {tuple(z.shape)} of (5, 8)")
    grads = [one.grad for one in (*first.parameters(), *second.parameters())]
    found = [one for one in grads if one is not None]
    check(bool(found) and all(map(torch.isfinite, map(torch.sum, found))), "no finite gradients")


def try_command(*arguments: str, prints: str) -> None:
    """The command that the installation wrote exits with 0 and prints the word."""
    command = str(Path(sys.prefix, "bin", "acmoe"))
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    said = " ".join(arguments)
    check(done.returncode == 0, f"acmoe {said} exits with {done.returncode}: {done.stderr}")
    check(prints in done.stdout, f"acmoe {said} does not print {prints!r}: {done.stdout}")


def main() -> None:
    file = Path(acmoe.__file__)
    check(file.is_relative_to(sys.prefix), f"acmoe comes from {file}, not from {sys.prefix}")
    known = version("acmoe")
    check(known == acmoe.__version__, f"metadata say {known}, the module {acmoe.__version__}")
    try_layers()
    try_command("--help", prints="finetune")
    try_command("models", prints="switch-small")
    print(f"smoke test: acmoe {known} from {file.parent} works")


if __name__ == "__main__":
    main()
