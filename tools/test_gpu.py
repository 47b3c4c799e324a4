"""Run every test that needs a CUDA device, or that runs its kernels there instead of interpreted.

    python tools/test_gpu.py [OPTION OF PYTEST ...]

These are the kernels as compiled code (tests/kernels), the runner and captured decoding
(tests/fast), and all tests that are marked gpu. Everything runs in this Python, from the sources
beside this file, in one process: tests share the device. Without a CUDA device it says so and exits
with 2. Otherwise it exits as pytest does: with the first failure's code, or with 5 if the options
select no test.
"""

import os
import subprocess
import sys
from pathlib import Path

NO_TEST = 5  # pytest's exit code where options such as -k select no test
ROOT = Path(__file__).parents[1]
# Tests in these folders move to the device where there is one; elsewhere the mark says so.
FOLDERS = ("tests/kernels", "tests/fast")


def commands(options: list[str]) -> list[list[str]]:
    """Return one call of pytest for the folders, and one for the marked tests of all others."""
    pytest = [sys.executable, "-m", "pytest", "-q"]
    ignored = [f"--ignore={folder}" for folder in FOLDERS]
    return [
        [*pytest, *FOLDERS, "-m", "not slow", *options],
        [*pytest, "tests", *ignored, "-m", "gpu", *options],
    ]


def no_device() -> str | None:
    """Return why these tests cannot run here, or None where they can."""
    try:
        import torch
    except ModuleNotFoundError:
        return f"torch is not installed for {sys.executable}; run `make setup`, or use its Python"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no CUDA device here; run this on a machine with a "
            "GPU (`make test` interprets the kernels on a CPU)"
        )
    return None


def main(options: list[str]) -> int:
    """Run the tests; return the exit code."""
    if reason := no_device():
        print(f"no GPU test was run: {reason}", file=sys.stderr)
        return 2
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    codes = [
        subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        for command in commands(options)
    ]
    return exit_code(codes)


def exit_code(codes: list[int]) -> int:
    """Return the first failure among the exit codes of pytest, or NO_TEST if none ran a test."""
    failed = [code for code in codes if code not in (0, NO_TEST)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
