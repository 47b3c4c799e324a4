"""Links, exports and expert pages of the report in a real Chromium, opened as a file."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from chromium import why_not
from watched_page import Watched

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
SVG = "{http://www.w3.org/2000/svg}"


def saved(page: Any, button: str) -> tuple[str, str]:
    """Return name and text of the file that a button saves; the button is pressed by key."""
    page.locator(button).focus()
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    return download.value.suggested_filename, Path(download.value.path()).read_text(
        encoding="utf-8"
    )


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_a_link_opens_a_token_an_expert_and_back_returns(
    browser: Any, text_report: Path, text_data: dict[str, Any]
) -> None:
    address = f"{text_report.as_uri()}#run=plain&layer=3&token=11"
    watched = Watched(browser, address)
    page = watched.page
    details = page.locator("#explorer-details")
    assert page.locator("#explorer-run").input_value() == "0"
    assert page.locator("#explorer-layer").input_value() == "3"
    assert "byte 11 of 640" in details.inner_text()
    assert page.evaluate("scrollY") > 0  # the explorer is in sight
    page.locator(".token").nth(20).click()
    assert watched.hash() == "#run=plain&layer=3&token=21"
    expert = text_data["runs"][0]["routing"]["layers"][2]["ids"][20][0]
    details.locator("a.chip").first.click()  # the first expert of the token, as a link
    assert watched.hash() == f"#run=plain&layer=3&expert={expert}"
    assert page.locator("#experts h3").inner_text() == f"Expert {expert} of MoE layer 3"
    page.go_back()
    assert watched.hash() == "#run=plain&layer=3&token=21"
    assert "byte 21 of 640" in details.inner_text()
    page.go_back()
    assert "byte 11 of 640" in details.inner_text()
    assert page.locator(".token[aria-selected=true]").get_attribute("id") == "token-10"
    watched.check_quiet(address)
    watched.context.close()


@pytest.mark.slow
def test_the_page_of_an_expert_lists_its_tokens_and_leads_to_them(
    browser: Any, text_report: Path, text_data: dict[str, Any]
) -> None:
    address = f"{text_report.as_uri()}#layer=2&expert=3"
    watched = Watched(browser, address)
    page, section = watched.page, watched.page.locator("#experts")
    found = text_data["runs"][1]["routing"]["by_expert"][1]
    assert section.locator("h3").inner_text() == "Expert 3 of MoE layer 2"
    assert f"It received {found['got'][3]:,} of {found['total']:,} bytes" in section.inner_text()
    shown = section.locator("#experts-top li").all_text_contents()
    wanted = [
        f"{value:.3f}{before}{text}{after}" for _, value, before, text, after in found["top"][3]
    ]
    assert shown == wanted
    places = [place for place, *_ in found["top"][3] if place < 640]
    link = section.locator("#experts-top a").first
    link.focus()
    page.keyboard.press("Enter")
    assert f"byte {places[0] + 1} of 640" in page.locator("#explorer-details").inner_text()
    assert page.evaluate("document.activeElement.id") == f"token-{places[0]}"
    page.locator("#pick-1").focus()
    page.keyboard.press(" ")
    assert section.locator("h3").inner_text() == "Expert 1 of MoE layer 2"
    assert page.evaluate("document.activeElement.id") == "pick-1"
    assert watched.hash() == "#run=adaptive&layer=2&expert=1"
    watched.check_quiet(address)
    watched.context.close()


NONSENSE = [
    "layer=99&token=-1&expert=4000&run=nobody&by=x&figure=__proto__&against=%",
    pytest.param("layer=two&token=1e9&expert=&&&===", marks=pytest.mark.slow),
    pytest.param("layer=%E0%A4%A&run=<img src=x onerror=alert(1)>=", marks=pytest.mark.slow),
    pytest.param("nowhere", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fragment", NONSENSE)
def test_a_link_with_nonsense_opens_the_usual_view(
    browser: Any, text_report: Path, fragment: str
) -> None:
    watched = Watched(browser, f"{text_report.as_uri()}#{fragment}")
    page = watched.page
    assert page.locator("#explorer-run").input_value() == "1"  # the adaptive one
    assert page.locator("#explorer-layer").input_value() == "2"
    assert "byte 5 of 640" in page.locator("#explorer-details").inner_text()
    assert page.locator("#experts h3").inner_text() == "Expert 0 of MoE layer 2"
    assert page.locator("#curves-metric").input_value() == "bits_per_byte"
    watched.check_quiet(text_report.as_uri())
    watched.context.close()


def test_charts_numbers_and_data_are_saved_from_a_file(
    browser: Any, text_report: Path, text_data: dict[str, Any]
) -> None:
    watched = Watched(browser, text_report.as_uri(), accept_downloads=True)
    page = watched.page
    name, text = saved(page, "#save-json")
    assert name == "acmoe-report.json"
    assert json.loads(text) == text_data

    name, text = saved(page, "#save-acmoe-convergence-csv")
    assert name == "acmoe-convergence.csv"
    points = [
        (run["name"], split, str(step), str(value))
        for run in text_data["runs"]
        for split in ("valid", "train")
        for step, value in zip(run[split]["step"], run[split]["bits_per_byte"], strict=True)
    ]
    found = [tuple(row.values()) for row in rows_of(text)]
    assert found == points

    name, text = saved(page, "#save-acmoe-convergence-svg")
    root = ElementTree.fromstring(text)
    assert name == "acmoe-convergence.svg"
    assert root.find(f"{SVG}title").text == "Convergence: bits per byte"
    # Four lines in the two colours of the runs, which are those of the style in the light theme.
    strokes = [one.get("stroke") for one in root.iter(f"{SVG}path")]
    assert strokes == ["rgb(10,94,168)"] * 2 + ["rgb(184,67,26)"] * 2
    assert not re.search(r"var\(|oklch|class=|https?://(?!www\.w3\.org/)", text)

    _, text = saved(page, "#save-acmoe-load-of-plain-csv")
    loads = [float(row["load_percent"]) for row in rows_of(text)]
    assert loads == [one for m in text_data["runs"][0]["routing"]["measures"] for one in m["load"]]
    watched.check_quiet(text_report.as_uri())
    watched.context.close()


@pytest.mark.slow
def test_every_chart_can_be_saved_in_both_forms(
    browser: Any, text_report: Path, text_data: dict[str, Any]
) -> None:
    watched = Watched(browser, text_report.as_uri(), accept_downloads=True, color_scheme="dark")
    page = watched.page
    names = page.locator(".save button").evaluate_all("all => all.map((one) => one.id)")
    assert len(names) == len(set(names)) == 2 * 8 + 1  # the expert's list has no picture
    for button in names:
        page.wait_for_timeout(120)  # Chromium drops what exceeds ten downloads a second
        name, text = saved(page, f"[id='{button}']")
        assert re.fullmatch(r"[a-z0-9._-]+", name)
        if name.endswith(".svg"):
            root = ElementTree.fromstring(text)
            boxes = [one.get("fill") for one in root.iter(f"{SVG}rect")]
            assert boxes[0] == "rgb(20,23,27)"  # the ground of the dark theme
            assert not re.search(r"var\(|oklch|class=", text)
            assert sum(1 for _ in root.iter(f"{SVG}text")) > 3
        else:
            assert len(rows_of(text)) >= 2
    _, text = saved(page, "#save-acmoe-the-explorer-csv")
    layer = text_data["runs"][1]["routing"]["layers"][1]
    assert [int(row["first_expert"]) for row in rows_of(text)] == layer["first"]
    assert [row["token"] for row in rows_of(text)] == text_data["samples"][0]["tokens"]
    _, text = saved(page, "#save-acmoe-the-explorer-svg")
    drawn = [one.text for one in ElementTree.fromstring(text).iter(f"{SVG}text")][1:]
    assert "".join(drawn) == "".join("".join(text_data["samples"][0]["tokens"]).split(" "))
    watched.check_quiet(text_report.as_uri())
    watched.context.close()


@pytest.mark.slow
def test_the_view_of_the_curves_is_kept_too(browser: Any, text_report: Path) -> None:
    watched = Watched(browser, text_report.as_uri())
    page = watched.page
    page.locator("#curves-metric").select_option("lr")
    page.locator("#curves-x").select_option("seconds")
    page.locator("#explorer-by").select_option("cluster")
    address = page.url
    again = Watched(browser, address)
    assert again.page.locator("#curves-metric").input_value() == "lr"
    assert again.page.locator("#curves-x").input_value() == "seconds"
    assert again.page.locator("#explorer-by").input_value() == "cluster"
    page.go_back()
    assert page.locator("#explorer-by").input_value() == "expert"
    page.go_back()
    assert page.locator("#curves-x").input_value() == "step"
    page.go_back()
    assert page.locator("#curves-metric").input_value() == "bits_per_byte"
    assert page.url == text_report.as_uri()
    for one in (watched, again):
        one.check_quiet(address)
        one.context.close()
