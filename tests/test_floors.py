"""The oldest versions that pyproject.toml allows are those that `make test-floors` installs."""

import tomllib
from pathlib import Path

import pytest

import floors

ROOT = Path(__file__).parents[1]


def test_the_constraints_are_the_floors_of_pyproject():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    written = (ROOT / "constraints-floors.txt").read_text()
    assert written == floors.constraints(pyproject), (
        "run: python tools/floors.py > constraints-floors.txt"
    )


def project(*dependencies, **extras):
    named = {"name": "some", "dependencies": dependencies, "optional-dependencies": extras}
    return {"project": named}


def test_a_floor_is_the_version_behind_the_first_sign():
    tools = ["triton>=3.6; platform_system == 'Linux'", "some[docs]"]
    given = project("torch>=2.10", docs=["mkdocs>=1.6,<2"], dev=tools)
    assert floors.floors(given) == {"torch": "2.10", "mkdocs": "1.6", "triton": "3.6"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (project("torch"), "'torch' in pyproject.toml has no floor"),
        (project("torch==2.10"), "has no floor"),
        (project("a>=1", dev=["a>=2"]), "a has the floors 1 and 2"),
    ],
)
def test_a_requirement_without_one_floor_is_refused(given, says):
    with pytest.raises(SystemExit, match=says):
        floors.floors(given)
