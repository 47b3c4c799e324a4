"""Print the oldest versions that pyproject.toml allows, as pip constraints.

    python tools/floors.py > constraints-floors.txt

`tests/test_floors.py` compares the file with pyproject.toml; `make test-floors` installs it.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = "# The floors of pyproject.toml, by tools/floors.py; `make test-floors` installs them."
FLOOR = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)\s*>=\s*(?P<version>[0-9][0-9.]*)")


def requirements(pyproject: dict) -> list[str]:
    """Return the requirements of the package and of its extras, without the package itself."""
    project = pyproject["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [text for group in groups for text in group if not text.startswith(project["name"])]


def floors(pyproject: dict) -> dict[str, str]:
    """Map each required package to its floor; two extras must agree on one."""
    found: dict[str, str] = {}
    for text in requirements(pyproject):
        match = FLOOR.match(text)
        if match is None:
            raise SystemExit(f"{text!r} in pyproject.toml has no floor: write name>=version")
        name, version = match["name"], match["version"]
        if found.setdefault(name, version) != version:
            raise SystemExit(f"{name} has the floors {found[name]} and {version}: write one")
    return found


def constraints(pyproject: dict) -> str:
    """Return the text of constraints-floors.txt."""
    pins = [f"{name}=={version}" for name, version in floors(pyproject).items()]
    return "\n".join([HEAD, *pins]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(constraints(tomllib.loads((ROOT / "pyproject.toml").read_text())))
