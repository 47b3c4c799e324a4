"""The figure docs/figures/two-clusters.html in a real Chromium: sliders, boundary, phone."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from chromium import why_not
from watched_page import CONTRAST, PHONE, SMALL_CONTROLS, Watched

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "two-clusters.html"
SIZE, REACH = 480, 4  # the drawing shows [-4, 4] x [-4, 4] on 480 x 480 units


def opened(browser: Any, **context: Any) -> Watched:
    return Watched(browser, FIGURE.as_uri(), ready="#numbers td", **context)


def move(page: Any, **values: float | str) -> None:
    for name, value in values.items():
        if isinstance(value, str):
            page.locator(f"[name={name}][value={value}]").check()
        else:
            page.locator(f"#{name}").fill(str(value))


def drawn_line(page: Any, name: str) -> tuple[tuple[float, float], float]:
    """Return the drawn line as a unit normal n and an offset c with n . h = c, in features."""
    path = page.locator(f"#drawing .rule.{name}").get_attribute("d")
    x1, y1, x2, y2 = (float(one) for one in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", path))
    (a, b), (c, d) = (
        (x / SIZE * 2 * REACH - REACH, REACH - y / SIZE * 2 * REACH)
        for x, y in ((x1, y1), (x2, y2))
    )
    length = math.hypot(c - a, d - b)
    normal = ((b - d) / length, (c - a) / length)
    return normal, normal[0] * a + normal[1] * b


def scale(spread: tuple[float, float], strength: float) -> tuple[float, float]:
    """Return M, by bisection: M_q = lambda / (s_q + alpha) with a mean of one.

    lambda is 10^strength times the harmonic mean of the spreads.
    """
    weight = 10**strength * 2 / (1 / spread[0] + 1 / spread[1])

    def total(alpha: float) -> float:
        return sum(weight / (one + alpha) for one in spread)

    low, high = -min(spread) + 1e-15, 1e6  # the total falls with alpha, from infinity to 0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) > 2 else (low, middle)
    first, second = (weight / (one + high) for one in spread)
    return first, second


def expected_line(state: dict[str, Any], cluster: str) -> tuple[tuple[float, float], float]:
    """Return unit normal and offset of the boundary between a and b in the M of a cluster."""
    spread = (state["tight"], state["loose"])
    if cluster == "b" and state["axes"] == "other":
        spread = (spread[1], spread[0])
    m = scale(spread, state["strength"])
    a, b = (state["ax"], state["ay"]), (state["bx"], state["by"])
    normal = [m[q] * (a[q] - b[q]) for q in (0, 1)]
    length = math.hypot(*normal)
    offset = 0.0  # dot product: M a . h = M b . h, a line through the origin
    if state["rule"] == "distance":  # equal distances in M
        offset = sum(m[q] * (a[q] ** 2 - b[q] ** 2) for q in (0, 1)) / 2
    return (normal[0] / length, normal[1] / length), offset / length


START = {"rule": "dot", "axes": "same", "tight": 0.25, "loose": 1.0, "strength": 0.0}
START |= {"ax": 0.5, "ay": 2.0, "bx": 1.9, "by": 0.8}
MOVES: list[dict[str, Any]] = [
    {},
    {"tight": 0.8},
    {"strength": 1.5},
    {"strength": -1.0, "rule": "distance"},
    {"axes": "other", "tight": 0.35, "bx": -1.2},
]


def test_sliders_move_the_boundary_to_where_the_formula_puts_it(browser: Any) -> None:
    watched = opened(browser)
    page, state = watched.page, dict(START)
    seen = set()
    for change in MOVES:
        state |= change
        move(page, **change)
        for cluster in ("a", "b"):
            (n, c), (wanted, offset) = (
                drawn_line(page, f"in-{cluster}"),
                expected_line(state, cluster),
            )
            sign = 1 if n[0] * wanted[0] + n[1] * wanted[1] > 0 else -1
            assert [sign * n[0], sign * n[1]] == pytest.approx(wanted, abs=1e-6), (change, cluster)
            assert sign * c == pytest.approx(offset, abs=1e-6), (change, cluster)
        seen.add(page.locator("#drawing .in-a").get_attribute("d"))
    assert len(seen) == len(MOVES)
    # At the paper's 1/s, M of spreads 0.25 and 1 is (1.6, 0.4).
    page.locator("[data-preset=counterexample]").click()
    assert page.locator("#numbers td").first.inner_text() == "(1.60, 0.40)"
    watched.check_quiet(FIGURE.as_uri())
    watched.context.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_phone_shows_the_figure_and_every_text_can_be_read(browser: Any, scheme: str) -> None:
    watched = opened(browser, viewport=PHONE, color_scheme=scheme, has_touch=True)
    page = watched.page
    for rule in ("dot", "distance"):
        move(page, rule=rule, strength=-1.5)
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.evaluate(SMALL_CONTROLS) == []
    box = page.locator("#plane").bounding_box()
    assert box["width"] <= PHONE["width"] and box["width"] == pytest.approx(box["height"], abs=1)
    watched.check_quiet(FIGURE.as_uri())
    watched.context.close()


@pytest.mark.slow
def test_the_sliders_work_by_keyboard(browser: Any) -> None:
    watched = opened(browser)
    page = watched.page
    page.locator("#tight").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("output[for=tight]").inner_text() == "0.30"
    line = page.locator("#drawing .in-a").get_attribute("d")
    page.locator("#strength").focus()
    page.keyboard.press("Home")
    assert page.locator("#drawing .in-a").get_attribute("d") != line
    style = "getComputedStyle(document.activeElement)"
    assert page.evaluate(f"{style}.outlineStyle") == "solid"
    watched.check_quiet(FIGURE.as_uri())
    watched.context.close()
