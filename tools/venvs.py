"""Virtual environments that borrow installed packages, so that torch is not downloaded again.

A `.pth` file adds folders of packages behind the environment's own. Python reads no `.pth` file in
a folder added so: the editable acmoe of .venv, which is one, stays invisible.
"""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

QUIET = ("--quiet", "--disable-pip-version-check")


def new_venv(folder: Path, borrowed: Sequence[Path]) -> Path:
    """Make an environment without pip that also sees the borrowed folders; return its Python."""
    venv.create(folder, clear=True, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    lines = [f"{path.resolve()}\n" for path in borrowed]
    (packages / "borrowed.pth").write_text("".join(lines))
    return folder.resolve() / "bin" / "python"


def install(python: Path, *what: str) -> None:
    """Install into the environment of `python` by the pip that runs this file.

    An error has the messages of pip as its `stderr`; they are printed as well.
    """
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *QUIET]
    done = subprocess.run([*pip, *what], stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    done.check_returncode()


def run_file(python: Path, *arguments: str) -> None:
    """Run a Python file there; -I ignores PYTHONPATH and the folder of the file."""
    subprocess.run([str(python), "-I", *arguments], check=True)
