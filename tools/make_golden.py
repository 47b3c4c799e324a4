"""Write the golden folder of the version that is checked out: tests/golden/VERSION.

    git checkout v0.2.0
    make golden          # about a minute

tests/golden/make.py trains two small runs and saves two models with this source; later versions
must open, resume and report them (tests/test_golden_run.py). A development version has none.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from release import IN_CODE, ROOT, VERSION


def golden_folder(root: Path) -> Path:
    """Return the new folder of the version that the source names; exit where there is none."""
    found = IN_CODE.search((root / "src/acmoe/__init__.py").read_text())
    version = found[1] if found else ""
    if not VERSION.fullmatch(version):
        raise SystemExit(f"version {version!r} is not released: check out its tag first")
    folder = root / "tests" / "golden" / version
    if folder.exists():
        raise SystemExit(f"{folder} is there already, and golden folders never change")
    return folder


def main(root: Path = ROOT) -> None:
    folder = golden_folder(root)
    folder.mkdir(parents=True)
    make = root / "tests" / "golden" / "make.py"
    source = os.environ | {"PYTHONPATH": str(root / "src")}
    try:
        subprocess.run([sys.executable, str(make)], check=True, cwd=folder, env=source)
    except BaseException:
        shutil.rmtree(folder)
        raise
    print(f"wrote {folder}; commit it with the beginning of the next version")


if __name__ == "__main__":
    main()
