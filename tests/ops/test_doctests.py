"""The examples in the documentation run and print what they say."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import acmoe.ops

KERNELS = re.compile(r"\.(triton|hopper|device)\b")
PROMPT = re.compile(r"^ *>>> ", re.MULTILINE)


def modules_with_examples() -> list[str]:
    """The mathematics, and the modules of other packages that a newcomer reads first."""
    modules = pkgutil.walk_packages(acmoe.ops.__path__, "acmoe.ops.")
    names = [module.name for module in modules if not KERNELS.search(module.name)]
    names += ["acmoe", "acmoe.routing.layer_plan", "acmoe.routing.router"]
    names += ["acmoe.experts.moe", "acmoe.experts.stack"]
    names += ["acmoe.hf.attach", "acmoe.hf.blend", "acmoe.hf.calibrate"]
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
    public = {
        "acmoe.ops.statistics.dispersion",
        "acmoe.ops.statistics.optimum",
        "acmoe.ops.statistics.scale",
        "acmoe",
    }
    assert public <= set(modules_with_examples())
