"""Seeds, test scores, settings and provenance of six runs, as Chromium shows them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acmoe.evaluate.saved import save_evaluation
from acmoe.evaluate.starts import STARTS
from acmoe.report.page import write_report
from acmoe.storage.lines import append_line
from acmoe.storage.sealed import write_sealed
from chromium import chromium, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

# Validation and test of seeds 0, 1 and 2. Differences of tests: -0.1, -0.2 and -0.3.
VALIDATION = {"plain": (2.0, 3.0, 4.0), "adaptive": (1.0, 2.5, 3.0)}
TEST = {"plain": (2.5, 3.5, 4.5), "adaptive": (2.4, 3.3, 4.2)}
HOSTILE = "acmoe train '<img src=x onerror=alert(1)>'"


def seed_of(run: Path, folder: Path, seed: int, validation: float, test: float | None) -> Path:
    """A copy of a run with another seed and other scores, without its checkpoints."""
    folder.mkdir()
    document = json.loads((run / "config.json").read_text())
    document["config"]["seed"] = seed
    del document["seal"]
    write_sealed(folder / "config.json", document)
    shutil.copy(run / STARTS, folder)
    metrics = folder / "metrics.jsonl"
    append_line(metrics, {"kind": "valid", "step": 10, "bits_per_byte": validation})
    append_line(metrics, {"kind": "valid", "step": 20, "bits_per_byte": validation + 0.25})
    if test is not None:
        figure = {"statistics": "none", "contaminated": False, "value": test, "tokens": 640}
        report = {"corpus": "Lines", "split": "test", "metric": "bits per byte", "batch": 8}
        more = {"block": 16, "precision": "fp32", "step": 10, "contamination": None}
        save_evaluation(folder, {**report, **more, "figures": [figure]})
    return folder


@pytest.fixture(scope="module")
def page(
    two_runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, list[str]]]:
    home = tmp_path_factory.mktemp("seeds")
    folders = [
        seed_of(run, home / f"{name}-{seed}", seed, VALIDATION[name][seed], TEST[name][seed])
        for run, name in zip(two_runs, ("plain", "adaptive"), strict=True)
        for seed in range(3)
    ]
    old = seed_of(two_runs[0], home / "old", 9, 3.0, None)
    start = json.loads((old / STARTS).read_text())
    (old / STARTS).unlink()  # as an earlier version leaves a run
    append_line(folders[0] / STARTS, {**start, "step": 7, "command": HOSTILE, "processes": 8})
    path, _ = write_report([*folders, old], home / "report.html", device="cpu")
    wrong: list[str] = []
    with chromium() as browser:
        shown = browser.new_page(viewport={"width": 1200, "height": 900})
        shown.on("console", lambda message: wrong.append(message.text))
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("dialog", lambda dialog: wrong.append(dialog.message))
        shown.goto(path.as_uri())
        yield shown, wrong


def rows(page: Any, table: str) -> list[str]:
    return [" ".join(row.split()) for row in page.locator(f"{table} tbody tr").all_inner_texts()]


def test_seeds_are_grouped_and_groups_are_paired(page: tuple[Any, list[str]]) -> None:
    shown, wrong = page
    plain, adaptive = rows(shown, "#groups")
    # The fourth plain run has no test score: validation 2, 3, 4, 3, deviation sqrt(2 / 3).
    assert "0, 1, 2, 9 3.0000 ± 0.82 n = 4 3.2500 ± 0.82 n = 4 3.5000 ± 1 n = 3" in plain
    assert "0, 1, 2 2.1667 ± 1 n = 3 2.4167 ± 1 n = 3 3.3000 ± 0.9 n = 3" in adaptive
    validation, test = rows(shown, "#pairs")
    assert "validation bits per byte 0, 1, 2" in validation
    # Mean -0.2, deviation 0.1, t(2) = 4.3027: half the interval is 0.2484.
    assert test.startswith("adaptive minus smoe test bits per byte 0, 1, 2")
    assert test.endswith("\u22120.2000 \u22120.4484 to +0.0484")
    assert "4.5000 bits per byte, at step 10" in rows(shown, "#summary")[2]
    assert "No test score of old." in shown.locator("#missing-tests").inner_text()
    assert "acmoe evaluate " in shown.locator("#missing-tests pre").inner_text()
    shown.locator("#tests summary").click()
    assert "640 tokens of Lines" in shown.locator("#tests").inner_text()
    assert wrong == []


def saved(page: Any, button: str) -> str:
    with page.expect_download() as download:
        page.locator(button).click()
    return Path(download.value.path()).read_bytes().decode("utf-8")


def test_curves_have_a_mean_over_the_seeds_of_a_configuration(page: tuple[Any, list[str]]) -> None:
    shown, wrong = page
    chart, legend = shown.locator(".chart"), shown.locator("#curves-legend")
    assert chart.locator(".line.behind path").count() == 7  # every run, behind its mean
    assert chart.locator(".line.mean path").count() == 2
    chart.focus()
    shown.keyboard.press("ArrowRight")  # from the middle, step 15, to step 20: 0.25 above step 10
    assert [" ".join(text.split()) for text in legend.locator("button").all_inner_texts()] == [
        "smoe, validation, mean of 4 seeds 3.25 ± 0.82",
        "adaptive, validation, mean of 3 seeds 2.417 ± 1",
    ]
    shown.locator("#curves-seeds").select_option("mean")
    assert chart.locator(".line.behind").count() == 0
    assert chart.locator("path.band").count() == 2
    rows_saved = saved(shown, "#save-acmoe-convergence-csv").splitlines()
    assert rows_saved[0] == "run,split,step,bits_per_byte,bits_per_byte_std"
    # Seeds 0, 1, 2 and 9 of the plain router have 2, 3, 4 and 3: the deviation is sqrt(2 / 3).
    assert rows_saved[1].startswith("smoe (mean of 4 seeds),valid,10,3,0.8164965")
    assert len(rows_saved) == 1 + 2 * 2
    drawing = saved(shown, "#save-acmoe-convergence-svg")
    assert drawing.count('opacity="0.16"') == 2 and "seeds" in drawing
    shown.locator("#curves-seeds").select_option("runs")
    assert legend.locator("button").count() == chart.locator(".line").count() == 7
    colors = legend.locator(".mark").evaluate_all("all => all.map((one) => one.classList[1])")
    assert colors == ["run-0"] * 3 + ["run-1"] * 3 + ["run-0"]  # a colour is a configuration
    assert wrong == []


def test_every_start_has_its_code_command_and_device(page: tuple[Any, list[str]]) -> None:
    shown, wrong = page
    found = rows(shown, "#provenance")
    assert len(found) == 8  # seven runs, one of which was continued
    for part in (" UTC", "acmoe ", "torch ", "Python ", "cpu ("):
        assert part in found[0]
    assert "after step 7" in found[1] and "8 processes" in found[1]
    assert found[1].endswith(HOSTILE)  # as text
    assert found[7].count("not recorded") == 5
    assert shown.locator("#provenance img").count() == 0
    assert wrong == []


def test_options_of_one_router_are_folded_away(page: tuple[Any, list[str]]) -> None:
    shown, wrong = page
    keys = shown.locator("#settings tbody th").all_inner_texts()
    assert keys == ["≠ model.router.name", "≠ seed"]
    details = shown.locator("#settings details")
    assert details.count() == 1
    assert details.locator("summary").inner_text().endswith("settings of the router adaptive only")
    assert not details.locator("li").first.is_visible()
    details.locator("summary").click()
    assert 'model.router.measure = "mad"' in details.inner_text()
    assert wrong == []


def test_a_phone_needs_no_scrolling_sideways(page: tuple[Any, list[str]]) -> None:
    shown, _ = page
    shown.set_viewport_size({"width": 360, "height": 740})
    assert shown.evaluate("document.documentElement.scrollWidth") == 360
