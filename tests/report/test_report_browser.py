"""The page in a real Chromium, opened as a file: no error, no request, every control in use."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import serving

from acmoe.storage.lines import append_line
from chromium import why_not
from watched_page import CONTRAST, SMALL_CONTROLS, Watched

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def report(text_report: Path) -> Path:
    return text_report


@pytest.fixture
def watched(browser: Any, report: Path) -> Iterator[Watched]:
    found = Watched(browser, report.as_uri())
    yield found
    found.check_quiet(report.as_uri())
    found.context.close()


def test_a_clicked_token_shows_its_affinities_cluster_features_and_the_other_run(
    watched: Watched,
) -> None:
    page = watched.page
    assert page.locator("#explorer-run").input_value() == "1"  # the adaptive one
    page.locator(".token").nth(10).click()
    details = page.locator("#explorer-details")
    assert page.locator(".token[aria-selected=true]").count() == 1
    assert details.locator("h3").inner_text().endswith("byte 11 of 640")
    text = details.inner_text()
    for part in ("Affinities", "Cluster", "Most stretched features", "In the other runs", "plain"):
        assert part in text
    assert details.locator(".bars").first.locator("li").count() == 4  # experts
    assert details.locator(".bars").nth(1).locator("li").count() == 6  # features


def test_the_slider_changes_the_layer_and_keeps_the_token(watched: Watched) -> None:
    page = watched.page
    page.locator(".token").nth(10).click()
    colours = set()
    for layer in ("1", "2", "3"):
        page.locator("#explorer-layer").fill(layer)
        assert page.locator("#explorer-layer-name").inner_text().startswith(f"{layer} of 3")
        labels = page.locator(".token").evaluate_all("all => all.map((one) => one.dataset.expert)")
        colours.add("".join(labels))
        assert "byte 11 of 640" in page.locator("#explorer-details").inner_text()
    assert len(colours) == 3
    page.locator("#explorer-layer").fill("1")
    assert "None yet" in page.locator("#explorer-details").inner_text()


def test_the_keyboard_alone_reaches_moves_and_chooses(watched: Watched) -> None:
    page = watched.page
    page.locator("#explorer-numbers").focus()
    for _ in range(5):  # the legend's four experts, then the one tab stop of the tokens
        page.keyboard.press("Tab")
    active = "document.activeElement.id"
    assert page.evaluate(active) == "token-4"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(active) == "token-5"
    assert page.locator("#token-5").get_attribute("aria-selected") == "false"
    page.keyboard.press("Enter")
    assert page.locator("#token-5").get_attribute("aria-selected") == "true"
    assert "byte 6 of" in page.locator("#explorer-details").inner_text()
    page.keyboard.press("ArrowDown")
    below = page.evaluate("document.activeElement.getBoundingClientRect().top")
    assert below > page.locator("#token-5").bounding_box()["y"] + 10
    page.keyboard.press("Home")
    assert page.evaluate(active) == "token-0"


def test_a_hostile_corpus_is_text(watched: Watched) -> None:
    page = watched.page
    shown = "".join(page.locator(".token").all_text_contents())
    assert "</script><script>window.broken = 1</script><img src=x onerror=alert(1)>" in shown
    assert page.evaluate("window.broken") is None
    assert page.locator("img").count() == 0


def test_the_chart_zooms_smooths_and_answers_keys(watched: Watched) -> None:
    page = watched.page
    chart, legend = page.locator(".chart"), page.locator("#curves-legend")

    def ticks() -> list[str]:
        return chart.locator(".axes text").all_text_contents()

    start = ticks()
    assert chart.locator("path").count() == 4  # two runs, training and validation
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    assert len([text for text in legend.locator("output").all_inner_texts() if text]) == 4
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 100)
    page.mouse.up()
    zoomed = ticks()
    assert zoomed != start
    page.locator("#curves-reset").click()
    assert ticks() == start
    chart.focus()
    page.keyboard.press("+")
    assert ticks() != start
    page.keyboard.press("0")
    assert ticks() == start
    page.keyboard.press("ArrowRight")
    assert "plain, validation" in page.locator(".unseen[aria-live]").inner_text()
    page.locator("#curves-smooth").fill("0.9")
    assert chart.locator("path.raw").count() == 4
    page.locator("#curves-log-y").check()
    page.locator("#curves-log-x").check()
    assert ticks() != start
    legend.locator("button").first.click()
    assert legend.locator("button").first.get_attribute("aria-pressed") == "false"
    assert chart.locator("path.raw").count() == 3


def test_what_differs_between_the_settings_is_marked_and_the_rest_can_be_shown(
    watched: Watched,
) -> None:
    page = watched.page
    rows = page.locator("#settings tbody tr")
    few = rows.count()
    assert page.locator("#settings tr.differs").count() == few > 0
    page.locator("#settings-all").check()
    assert rows.count() > few
    assert page.evaluate("document.activeElement.id") == "settings-all"


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_every_text_can_be_read_in_both_schemes(browser: Any, report: Path, scheme: str) -> None:
    watched = Watched(browser, report.as_uri(), color_scheme=scheme)
    assert watched.page.evaluate(CONTRAST) == []
    watched.page.locator("#theme").click()  # light
    watched.page.locator("#theme").click()  # dark
    assert "dark" in watched.page.locator("#theme").inner_text()
    assert watched.page.evaluate(GROUND) == "rgb(20, 23, 27)"
    assert watched.page.evaluate(CONTRAST) == []
    watched.check_quiet(report.as_uri())
    watched.context.close()


def pixels_of(picture: bytes) -> np.ndarray:
    image = pytest.importorskip("PIL.Image")
    return np.asarray(image.open(io.BytesIO(picture)).convert("L"), dtype=float)


def test_no_section_is_an_empty_picture(watched: Watched) -> None:
    for section in watched.page.locator("main > section").all():
        levels = pixels_of(section.screenshot())
        # Ink on at least a hundredth of the area, and more than a flat colour.
        assert (np.abs(levels - np.median(levels)) > 40).mean() > 0.01, section.get_attribute("id")


def test_a_phone_sees_everything_without_scrolling_sideways(browser: Any, report: Path) -> None:
    watched = Watched(browser, report.as_uri(), viewport={"width": 360, "height": 740})
    watched.page.locator(".token").nth(10).click()
    assert watched.page.evaluate("document.documentElement.scrollWidth") == 360
    assert watched.page.evaluate(SMALL_CONTROLS) == []
    assert watched.page.locator("#summary td").first.is_visible()
    watched.context.close()


def test_paper_gets_light_colours_and_no_controls(browser: Any, report: Path) -> None:
    watched = Watched(browser, report.as_uri(), color_scheme="dark")
    watched.page.emulate_media(media="print")
    assert watched.page.evaluate(GROUND) == "rgb(255, 255, 255)"
    assert not watched.page.locator("nav").is_visible()
    assert not watched.page.locator("#curves .controls").is_visible()
    assert watched.page.locator("#explorer-details").is_visible()
    watched.context.close()


def test_patches_over_images_are_chosen_and_followed_into_a_coarser_grid(
    browser: Any, image_report: Path
) -> None:
    watched = Watched(browser, image_report.as_uri())
    page = watched.page
    assert page.locator(".image img").count() == 12 * 2  # clean beside attacked
    assert page.locator(".token").count() == 12 * 16  # 8 pixels in patches of 2: a 4 x 4 grid
    page.locator(".token").nth(2 * 16 + 4 * 2 + 3).click()
    details = page.locator("#explorer-details")
    assert details.locator("h3").inner_text().startswith("Image 3: ")
    assert "row 3, column 4; classified as" in details.inner_text()
    assert "In the other runs" in details.inner_text()
    last = page.locator("#explorer-layer").get_attribute("max")
    page.locator("#explorer-layer").fill(last)
    assert page.locator(".token").count() == 12 * 4  # merged into 2 x 2
    assert "row 2, column 2; classified as" in details.inner_text()
    assert page.locator(".twin").count() == 12 * 4
    page.locator(".twin").nth(5).click()  # of an attacked image: chooses the clean patch
    assert page.locator(".token[aria-selected=true]").get_attribute("id") == "token-5"
    assert "Under attack" in details.inner_text()
    watched.check_quiet(image_report.as_uri())
    watched.context.close()


@pytest.mark.slow
def test_a_served_page_takes_in_news_and_keeps_what_was_chosen(
    browser: Any, two_runs: tuple[Path, Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(two_runs[1], tmp_path / "run"))
    with serving(run, tokens=64) as server:
        watched = Watched(browser, server.url)
        page = watched.page
        page.locator("#explorer-layer").fill("3")
        page.locator(".token").nth(10).click()
        before = page.evaluate("window.scrollY")
        news = {"kind": "valid", "step": 77, "bits_per_byte": 0.25}
        append_line(run / "metrics.jsonl", news)
        page.get_by_text("at step 77").first.wait_for(timeout=15000)
        assert page.evaluate("document.activeElement.id") == "token-10"
        assert page.locator("#explorer-layer").input_value() == "3"
        assert page.evaluate("window.scrollY") == before
        assert watched.wrong == []
        assert all(url.startswith(server.url) for url in watched.requests)
        watched.context.close()
