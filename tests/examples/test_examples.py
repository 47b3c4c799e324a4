"""The scripts in examples/ train, and nobody in them writes a word about statistics.

The loops of other packages need the extra `examples`, which `dev` includes; where a package is
missing, its test is skipped and says so. test_notebooks.py runs the notebooks.
"""

import ast
import difflib
import importlib
import re
from pathlib import Path

import pytest
import torch

from acmoe.routing.statistics import ClusterStatistics

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def train(name, package=None, **options):
    if package is not None:
        pytest.importorskip(package, reason=f"needs {package}: pip install 'acmoe[examples]'")
    return importlib.import_module(name).main(**options)


def changed_lines(before, after):
    """The lines that differ, as the pairs of blocks (old, new) of a diff."""
    old, new = ((EXAMPLES / f"{name}.py").read_text().splitlines() for name in (before, after))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    blocks = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    return [(old[a:b], new[c:d]) for _, a, b, c, d in blocks]


def test_an_import_and_four_lines_make_a_nanogpt_adaptive():
    changes = changed_lines("nanogpt_plain", "nanogpt")
    added = [line.strip() for _, new in changes for line in new if line.strip()]
    assert added[0] == "import acmoe"
    assert len(added) == 5
    words = ("acmoe.MoEFFN(", "acmoe.MoEStack(", "x, state = self.blocks(x)", "+ state.aux_loss")
    assert all(word in line for word, line in zip(words, added[1:], strict=True))


def test_the_router_alone_takes_at_most_ten_lines():
    tree = ast.parse((EXAMPLES / "own_experts.py").read_text())
    model = next(node for node in tree.body if getattr(node, "name", "") == "Model")
    about = re.compile(r"rout|state")
    lines = {
        number
        for node in ast.walk(model)
        if isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.FunctionDef)
        for number in range(node.lineno, node.end_lineno + 1)
    }
    source = (EXAMPLES / "own_experts.py").read_text().splitlines()
    assert 3 <= sum(bool(about.search(source[number - 1])) for number in lines) <= 10


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_example_says_anything_about_statistics(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not {one for one in names if "statistics" in one}


def assert_trained(model, losses, *, least_fall):
    """The loss fell, and every layer that another follows has measured every step."""
    first, last = torch.tensor(losses[:3]).mean(), torch.tensor(losses[-3:]).mean()
    assert last < first - least_fall
    found = [module for module in model.modules() if isinstance(module, ClusterStatistics)]
    assert len(found) >= 2
    for statistics in found:
        # The discounted count of n equal steps of T tokens is T * (1 - m^n) in all.
        assert statistics.weight.sum() > 0
        assert not torch.equal(statistics.average_scale(), torch.ones_like(statistics.dispersion))


def test_nanogpt_learns_and_its_statistics_move():
    model, losses = train("nanogpt", steps=12)
    assert losses[0] > 5.0  # ln 256 = 5.55: it begins by knowing nothing
    assert_trained(model, losses, least_fall=1.0)


def test_the_router_over_one_s_own_experts_learns_and_its_statistics_move():
    model, losses = train("own_experts", steps=15)
    assert_trained(model, losses, least_fall=5.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of packages that are not ours
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("accelerate_loop", "accelerate"),
        ("lightning_loop", "lightning"),
        ("trainer_loop", "transformers"),
        ("trainer_attach", "transformers"),
    ],
)
def test_other_people_s_loops_need_nothing_said(name, package):
    model, losses = train(name, package, epochs=1)
    assert len(losses) == 12
    assert_trained(model, losses, least_fall=0.5)


@pytest.mark.slow
def test_the_plain_nanogpt_learns_too():
    _, losses = train("nanogpt_plain", steps=12)
    assert losses[-1] < losses[0] - 1.0
