"""The tools behind `make docs`: generated reference pages, dead links, the picture of the idea."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

import reference
from acmoe.cli.commands import COMMANDS
from check_links import dead_links

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", reference.CONFIG_MODULES)
def test_every_option_of_a_config_has_a_meaning(module):
    found = list(reference.config_classes(module))
    assert found
    silent = [f"{c.name}.{o.name}" for c in found for o in c.options if not o.meaning]
    assert not silent, "write a comment above or behind these fields"


def test_an_option_has_its_values_default_and_meaning():
    page = reference.configs_page()
    assert "| `top_k` | `int` | `2` | experts that a token is sent to |" in page
    assert "| `lr` | `float` | required | peak learning rate of Adam |" in page
    assert r"| `norm` | `'post' \| 'pre'` | `'post'` | The paper's post-norm block" in page
    assert "| `rate` | `float \\| None` | `None` | fraction of words or bytes replaced;" in page
    assert r"| `gate` | `'auto' \| 'selected' \| 'all'` | `'auto'` | softmax" in page  # an alias
    assert "from `strength` to `strength_end` in `strength_steps`" in page  # no escapes in code
    assert "min\\_tokens=0" in page


def test_the_page_of_commands_has_every_command_and_subcommand():
    headings = re.findall(r"^#+ acmoe (.+)$", reference.commands_page(), re.MULTILINE)
    assert [name for name in headings if " " not in name] == list(COMMANDS)
    assert {"data prepare", "bench layer", "bench tune"} <= set(headings)


def test_dead_files_and_anchors_are_found(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="deep/">x</a><a href="deep/#here">x</a><a href="#top">x</a>'
        '<a href="https://example.org/nothing">x</a><a href="gone.html">x</a>'
        '<a href="deep/#away">x</a><img src="../outside.png">'
    )
    (tmp_path / "deep" / "index.html").write_text('<p id="here"><a href="../#nowhere">x</a>')
    assert dead_links(tmp_path) == [
        "deep/index.html: ../#nowhere",
        "index.html: gone.html",
        "index.html: deep/#away",
        "index.html: ../outside.png",
    ]


def test_the_picture_has_the_errors_of_the_interactive_figure():
    spec = importlib.util.spec_from_file_location("idea", ROOT / "docs" / "images" / "idea.py")
    idea = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(idea)
    page = (ROOT / "docs" / "figures" / "two-clusters.html").read_text()
    presets = re.search(r'id="presets">(.*?)</script>', page, re.DOTALL)[1]
    shown = json.loads(presets)["ideal"]["shown"]["dot"]
    before = idea.error(np.ones(2), idea.A, idea.STD_A, idea.A, idea.B)
    after = idea.error(idea.scale(idea.STD_A), idea.A, idea.STD_A, idea.A, idea.B)
    assert [f"{before:.3f}", f"{after:.3f}"] == [shown["before"][0], shown["after"][0]]
    readme = (ROOT / "README.md").read_text()
    assert f"{before:.1%} of cluster a" in readme
    assert f"{after:.1%} go there" in readme
