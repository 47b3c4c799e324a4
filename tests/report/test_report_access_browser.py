"""The report by keyboard, on a phone and in both themes, in a real Chromium."""

from pathlib import Path
from typing import Any

import pytest

from chromium import why_not
from watched_page import CONTRAST, FOCUSED, PHONE, SMALL_CONTROLS, TAB_STOPS, Watched

REASON = why_not()
# The fast run has one case of each in test_report_browser.py.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]


@pytest.fixture(params=["images", "text"])
def report(request: pytest.FixtureRequest) -> Path:
    name = "image_report" if request.param == "images" else "text_report"
    path: Path = request.getfixturevalue(name)
    return path


def test_a_phone_has_controls_to_hit_and_nothing_to_scroll_sideways(
    browser: Any, report: Path
) -> None:
    watched = Watched(browser, report.as_uri(), viewport=PHONE, has_touch=True)
    page = watched.page
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.evaluate(SMALL_CONTROLS) == []
    page.locator("#explorer-layer").fill("2")
    page.locator("#pick-1").tap()
    page.locator("#settings-all").check()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.evaluate(SMALL_CONTROLS) == []
    watched.check_quiet(report.as_uri())
    watched.context.close()


def test_tab_reaches_every_control_in_order_with_a_visible_focus(
    browser: Any, report: Path
) -> None:
    watched = Watched(browser, report.as_uri())
    page = watched.page
    stops = page.evaluate(f"{TAB_STOPS.strip()}.length")
    assert stops > 30
    reached = []
    for _ in range(stops):
        page.keyboard.press("Tab")
        place, ring, node = page.evaluate(FOCUSED)
        assert ring, node
        reached.append(place)
    assert reached == list(range(stops))
    watched.check_quiet(report.as_uri())
    watched.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_every_view(browser: Any, report: Path, scheme: str) -> None:
    watched = Watched(browser, report.as_uri(), color_scheme=scheme)
    page = watched.page
    assert page.evaluate(CONTRAST) == []
    page.locator("#explorer-numbers").check()
    page.locator("#settings-all").check()
    page.locator("#curves-smooth").fill("0.5")
    page.locator(".chart").focus()
    page.keyboard.press("ArrowRight")  # the cross-hair has a text too
    assert page.evaluate(CONTRAST) == []
    page.locator("#expert-1").click()  # one expert alone
    page.locator("#explorer-by").select_option("cluster")
    page.locator("#curves-legend button").first.click()
    assert page.evaluate(CONTRAST) == []
    watched.check_quiet(report.as_uri())
    watched.context.close()


def test_a_text_too_pale_is_found(browser: Any) -> None:
    page = browser.new_page()
    page.set_content(
        "<style>i::after { content: 'x'; color: #999 } .half { opacity: .4 }</style>"
        "<p style='color:#767676'>good</p><p style='color:#777'>bad</p><p class=half>bad</p>"
        "<i>good</i><svg><text y=9 fill='#888'>bad</text><text y=9>good</text></svg>"
    )
    assert len(page.evaluate(CONTRAST)) == 4
    page.close()


def test_images_stand_beside_their_attacked_copies(browser: Any, image_report: Path) -> None:
    address = f"{image_report.as_uri()}#run=adaptive&layer=2&token=12"
    watched = Watched(browser, address)
    page = watched.page
    text = page.locator("#explorer-details").inner_text()
    assert "row 3, column 4; classified as" in text
    assert "Under attack" in text
    about = page.locator("#explorer-about").inner_text()
    assert "FGSM, radius 4/255" in about and "SoftMoE" not in about
    assert page.locator(".twin").count() == page.locator(".token").count() == 12 * 16
    moved = page.evaluate(
        "[...document.querySelectorAll('.twin')].filter((twin, n) => twin.dataset.expert !== "
        "document.querySelectorAll('.token')[n].dataset.expert).length"
    )
    assert page.locator(".twin.moved").count() == moved
    page.locator(".twin").nth(17).click()  # chooses the patch of the clean image
    assert page.locator(".token[aria-selected=true]").get_attribute("id") == "token-17"
    page.locator("#explorer-beside").uncheck()
    assert page.locator(".twin").count() == 0
    assert page.locator("#experts-top a.patch svg image").count() > 0
    page.locator("#explorer-run").select_option("2")
    assert "SoftMoE has no hard choice" in page.locator("#explorer-about").inner_text()
    assert "dispatch weights" in page.locator("#experts").inner_text()
    watched.check_quiet(address)
    watched.context.close()
