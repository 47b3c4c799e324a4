"""The examples in the documentation run and print what they say."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import acmoe.ops

PROMPT = re.compile(r"^ *>>> ", re.MULTILINE)


def modules_with_examples() -> list[str]:
    """The mathematics, and the pages of other rooms that a newcomer reads first."""
    names = [f"acmoe.ops.{module.name}" for module in pkgutil.iter_modules(acmoe.ops.__path__)]
    names += ["acmoe", "acmoe.routing.placement", "acmoe.experts.moe"]
    return [name for name in names if PROMPT.search(source(name))]


def source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_print_what_they_say(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0
    # A prompt that doctest does not find, say in a comment, would pass by not running.
    assert outcome.attempted == len(PROMPT.findall(source(name)))


def test_the_public_mathematics_has_examples() -> None:
    public = {"acmoe.ops.dispersion", "acmoe.ops.optimum", "acmoe.ops.scale", "acmoe"}
    assert public <= set(modules_with_examples())
