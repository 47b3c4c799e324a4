"""The page docs/figures/two-clusters.html: its numbers, its functions in node, its controls."""

import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urljoin

import pytest
import torch

from acmoe import optimal_weights
from acmoe.lab.theory.gaussians import both_above, rule_z, upper_tail
from acmoe.lab.theory.robustness.dot_product import MEANS, STD, errors
from acmoe.lab.theory.scale import exact_scale
from chromium import chromium, why_not
from slow_cases import mostly_slow

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "figures" / "two-clusters.html"
TEXT = PAGE.read_text(encoding="utf-8")
NODE = shutil.which("node")
NO_BROWSER = why_not()
COLUMNS = ("before", "after", "chosen")
RULES = ("dot", "distance")


def script(name):
    """The text of the page's script with this id."""
    (found,) = re.findall(rf'<script[^>]*\bid="{name}">(.*?)</script>', TEXT, re.DOTALL)
    return found


PRESETS = json.loads(script("presets"))


def in_node(expression):
    """The value of a JavaScript expression over the page's pure functions."""
    program = f"{script('mathematics')}\nconsole.log(JSON.stringify({expression}))"
    done = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def rule(scale_D, means_CD, kind):
    lengths_C = (scale_D * means_CD.square()).sum(-1)
    offset = (lengths_C[1] - lengths_C[0]) / 2 * (kind == "distance")
    return scale_D * (means_CD[0] - means_CD[1]), offset


def both_wrong(k, mean_D, covariance_DD, first, second):
    """P(both rules choose the other cluster than k); they choose a where they are positive."""
    z, y = ((1 - 2 * k) * rule_z(mean_D, covariance_DD, *one).item() for one in (first, second))
    u_D, v_D = (covariance_DD.sqrt() @ normal_D for normal_D, _ in (first, second))
    correlation = (u_D @ v_D / (u_D.norm() * v_D.norm())).item()
    return both_above(z, y, correlation, points=200_001)  # correlations come close to one


def expected(state):
    """The errors of a, b and both, from the theory suite's probabilities of linear rules."""
    means_CD = double([[state["ax"], state["ay"]], [state["bx"], state["by"]]])
    a = [state["tight"], state["loose"]]
    std_CD = double([a, a if state["axes"] == "same" else a[::-1]])
    harmonic_C = 1 / (1 / std_CD).mean(-1)
    scale_CD = 2 * optimal_weights(std_CD, harmonic_C[:, None] * 10 ** state["strength"])
    plain = rule(double([1, 1]), means_CD, state["rule"])
    both = [rule(scale_D, means_CD, state["rule"]) for scale_D in scale_CD]
    found = {name: [] for name in COLUMNS}
    for k, (mean_D, std_D) in enumerate(zip(means_CD, std_CD, strict=True)):
        cluster = (mean_D, torch.diag(std_D.square()))
        own, other = both[k], both[1 - k]
        before, after = (
            upper_tail((1 - 2 * k) * rule_z(*cluster, *one)).item() for one in (plain, own)
        )
        stay, repeat = (both_wrong(k, *cluster, plain, one) for one in (own, other))
        for name, error in zip(COLUMNS, (before, after, after - stay + repeat), strict=True):
            found[name].append(error)
    return {name: [*pair, sum(pair) / 2] for name, pair in found.items()}


def random_state(draw):
    numbers = {name: draw.uniform(0.1, 1.5) for name in ("tight", "loose")}
    numbers |= {name: draw.uniform(-2.5, 2.5) for name in ("ax", "ay", "bx", "by")}
    choices = {"rule": draw.choice(RULES), "axes": draw.choice(("same", "other"))}
    return {**choices, **numbers, "strength": draw.uniform(-2, 2)}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("name", PRESETS)
def test_the_numbers_of_the_presets_are_the_closed_forms(name, kind):
    preset = PRESETS[name]
    found = expected({**preset["state"], "rule": kind})
    shown = {column: [f"{error:.3f}" for error in errors] for column, errors in found.items()}
    assert shown == preset["shown"][kind]


def test_the_presets_are_the_example_of_the_theory_page_and_one_by_hand():
    state, shown = (PRESETS["counterexample"][key] for key in ("state", "shown"))
    assert [[state["ax"], state["ay"]], [state["bx"], state["by"]]] == MEANS.tolist()
    assert ([state["tight"], state["loose"]], state["axes"]) == (STD.tolist(), "same")
    exact = errors(exact_scale(STD))
    for kind, name in (("dot", "dot product"), ("distance", "distance")):
        assert shown[kind]["after"][:2] == [f"{error:.3f}" for error in exact[name]]
        assert shown[kind]["before"][:2] == [f"{error:.3f}" for error in exact["plain"]]
    assert shown["dot"]["after"] == ["0.586", "0.000", "0.293"]
    # The ideal case: M = (2.5, 1) / 1.75, so z goes from 1.5 / sqrt(1.16) to 2.5 * 1.5 / sqrt(2).
    before, after = (math.erfc(z / 2**0.5) / 2 for z in (1.5 / 1.16**0.5, 3.75 / 2**0.5))
    dot = PRESETS["ideal"]["shown"]["dot"]
    assert (dot["before"][2], dot["after"][2]) == (f"{before:.3f}", f"{after:.3f}")


def test_the_page_is_one_file_and_the_theory_page_shows_it():
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<link|@import|\bsrc=|fetch\(", TEXT)
    markdown = (DOCS / "theory.md").read_text(encoding="utf-8")
    assert "](figures/two-clusters.html)" in markdown
    (source,) = re.findall(r'<iframe src="([^"]+)"', markdown)  # as on the site: theory/index.html
    assert urljoin("theory/", source) == "figures/two-clusters.html"


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@mostly_slow("draws", [4, 20])
def test_the_functions_of_the_page_agree_with_the_library(draws):
    draw = random.Random(0)
    states = [random_state(draw) for _ in range(draws)]
    states += [{**one["state"], "rule": kind} for one in PRESETS.values() for kind in RULES]
    spreads = [[10 ** draw.uniform(-3, 3) for _ in range(3)] for _ in range(100)]
    tails = [-8.0, -3.01, -0.5, 0.0, 1e-9, 1.0, 2.999, 3.001, 8.0, 30.0]
    found = in_node(
        f"{{solved: {json.dumps(states)}.map(solve), tails: {json.dumps(tails)}.map(upperTail), "
        f"metrics: {json.dumps(spreads)}.map(([s, t, lambda]) => metricOf([s, t], lambda))}}"
    )
    for state, solved in zip(states, found["solved"], strict=True):
        for column, wanted in expected(state).items():
            assert solved[column] == pytest.approx(wanted, abs=1e-8), (column, state)
        if state["rule"] == "distance" and solved["power"] <= 2:  # Theorem A
            assert all(solved["after"][k] <= solved["before"][k] + 1e-12 for k in (0, 1))
    for (s, t, strength), metric in zip(spreads, found["metrics"], strict=True):
        weights_D = optimal_weights(double([s, t]), strength)
        assert metric == pytest.approx((2 * weights_D).tolist(), rel=1e-9)
    assert found["tails"] == pytest.approx(
        [math.erfc(z / 2**0.5) / 2 for z in tails], rel=1e-11, abs=0
    )


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_degenerate_clusters_have_errors_too():
    state = {**PRESETS["ideal"]["state"], "axes": "same"}
    tied = {**state, "bx": state["ax"], "by": state["ay"]}
    round_ = {**state, "tight": 1, "strength": 1.5}
    tied, round_ = in_node(f"{json.dumps([tied, round_])}.map(solve)")
    assert tied["before"] == tied["after"] == tied["chosen"] == [0.5, 0.5, 0.5]
    assert round_["metrics"] == [[1, 1], [1, 1]]
    assert round_["before"] == round_["after"] == pytest.approx(round_["chosen"], abs=1e-12)


@pytest.mark.skipif(NO_BROWSER is not None, reason=NO_BROWSER or "")
@pytest.mark.slow  # tests/docs/test_figure_browser.py has the fast cases
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser_on_a_phone_and_by_keyboard(scheme):
    contrast = (DOCS.parent / "tests" / "report" / "contrast.js").read_text()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
        wrong, asked = [], []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(PAGE.as_uri())

        def table():
            return {
                name: [page.locator(f'[data-error="{name} {k}"]').inner_text() for k in range(3)]
                for name in COLUMNS
            }

        for name, preset in PRESETS.items():
            page.locator(f"[data-preset={name}]").click()
            for kind in RULES:
                page.locator(f"[name=rule][value={kind}]").check()
                assert table() == preset["shown"][kind]
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        table_box = "document.querySelector('.scroll')"
        assert page.evaluate(f"{table_box}.scrollWidth <= {table_box}.clientWidth")  # all is seen
        assert page.evaluate(contrast) == []
        line = page.locator("#drawing .in-b")
        before = line.get_attribute("d")
        page.locator("#by").focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator("output[for=by]").inner_text() == "1.45"
        assert line.get_attribute("d") != before
        for field in page.locator("input[type=range]").all():
            name = field.get_attribute("id")
            assert page.locator(f"label[for={name}]").count() == 1
        assert (wrong, asked) == ([], [PAGE.as_uri()])
