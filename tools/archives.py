"""Check the wheel and the sdist in dist/, install each and run tools/smoke.py there.

    make dist        # builds both, runs `twine check` and then this file

Each is installed in a new environment under build/, without its dependencies: those come from the
environment that runs this file (tools/venvs.py), because torch is large. That the listed
dependencies suffice is what `make test-extras` tries.
"""

import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from venvs import install, new_venv, run_file

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
MOST_BYTES = 3_000_000  # the package is code: a data file that slips in is seen here
# Beside src/acmoe. The tests stay in the repository: they read its pages, records and examples.
BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"}
MADE = {"PKG-INFO", ".gitignore"}  # by hatchling


def tracked(folder: str) -> set[str]:
    """Return the files of the repository under the folder."""
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(listed.stdout.splitlines())


def in_wheel(file: Path) -> set[str]:
    """Return the files in a wheel, without its metadata."""
    names = zipfile.ZipFile(file).namelist()
    return {name for name in names if not name.split("/")[0].endswith(".dist-info")}


def in_sdist(file: Path) -> set[str]:
    """Return the files in an sdist, without the folder around them."""
    with tarfile.open(file) as archive:
        names = [one.name.split("/", 1)[1] for one in archive if one.isfile()]
    return set(names) - MADE


def compare(file: Path, found: set[str], expected: set[str]) -> list[str]:
    """Return a line for each way in which an archive is not as it should be."""
    wrong = []
    if more := sorted(found - expected):
        wrong.append(f"{file.name} holds {', '.join(more[:5])}: {len(more)} files too many")
    if less := sorted(expected - found):
        wrong.append(f"{file.name} lacks {', '.join(less[:5])}: {len(less)} files")
    if (size := file.stat().st_size) > MOST_BYTES:
        wrong.append(f"{file.name} has {size:,} bytes, more than {MOST_BYTES:,}")
    return wrong


def only(pattern: str) -> Path:
    found = sorted((ROOT / "dist").glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"dist/ holds {len(found)} files {pattern}, not one: run make dist")
    return found[0]


def try_archive(file: Path) -> None:
    """Install the archive in an environment under build/ and run the smoke test there."""
    name = "wheel" if file.suffix == ".whl" else "sdist"
    here, tools = Path(sys.prefix), BUILD / "venv-dist"
    packages = [next(one.glob("lib/python*/site-packages")) for one in (here, tools)]
    python = new_venv(BUILD / f"venv-{name}", packages)
    # The backend that builds the sdist is one of the borrowed packages: nothing is downloaded.
    install(python, "--no-deps", "--no-build-isolation", "--ignore-installed", str(file))
    run_file(python, str(ROOT / "tools" / "smoke.py"))


def main() -> None:
    wheel, sdist = only("*.whl"), only("*.tar.gz")
    code = tracked("src/acmoe")
    wrong = compare(wheel, in_wheel(wheel), {name.removeprefix("src/") for name in code})
    wrong += compare(sdist, in_sdist(sdist), code | BESIDE)
    if wrong:
        raise SystemExit("\n".join(wrong))
    with ThreadPoolExecutor() as pool:  # side by side: most of the time is spent in importing torch
        tried = {file: pool.submit(try_archive, file) for file in (wheel, sdist)}
    for file, done in tried.items():
        if error := done.exception():
            raise SystemExit(f"{file.name} cannot be used: {error}")
        print(f"{file.name}: {file.stat().st_size:,} bytes, can be installed and used")


if __name__ == "__main__":
    main()
