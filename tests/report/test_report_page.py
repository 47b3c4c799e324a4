"""The file itself: what it holds, how it is closed against the outside and against its data."""

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acmoe.errors import UserError
from acmoe.report.content import aligned_settings
from acmoe.report.page import SCRIPTS, escaped_json, render, static, write_report
from acmoe.report.routing import MOST_AFFINITIES, RoutingReader
from acmoe.report.runs import read_run
from acmoe.storage.sealed import write_sealed
from run_facts import HOSTILE, run_facts

STATIC = Path(__file__).parents[2] / "src" / "acmoe" / "report" / "static"


@pytest.fixture(scope="module")
def page(text_report: Path) -> str:
    return text_report.read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    data: dict[str, Any] = json.loads(text)
    return data


@given(st.text())
def test_any_text_survives_in_a_script_element(text: str) -> None:
    written = escaped_json({"text": text})
    assert json.loads(written) == {"text": text}
    assert not set(written) & set("<>&\u2028\u2029")


def test_a_class_whose_name_is_no_utf8_stands_in_the_page() -> None:
    name = b"c\xff".decode("utf-8", "surrogateescape")  # as a folder of that name is listed
    written = escaped_json({"classes": [name, "naïve"]})
    assert written.encode("utf-8") == '{"classes":["c\\udcff","naïve"]}'.encode()
    assert json.loads(written)["classes"] == [name, "naïve"]


def test_figures_that_are_no_numbers_become_null() -> None:
    values = [float("nan"), float("inf"), 1.5, {"x": -float("inf")}, (2.0,)]
    assert json.loads(escaped_json(values)) == [None, None, 1.5, {"x": None}, [2.0]]


def test_the_corpus_stands_in_the_page_as_data_only(page: str) -> None:
    assert HOSTILE not in page
    assert page.count("<script") == 2  # the data and the page's own
    data = data_of(page)
    shown = "".join(data["samples"][0]["tokens"])
    assert "</script><script>window.broken = 1</script>" in shown
    assert "{{DATA}}" in shown


def test_scripts_and_styles_are_allowed_by_their_hash_and_nothing_else_is(page: str) -> None:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    for tag, directive in (('script type="module"', "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "connect-src" not in policy


def test_a_page_in_a_file_cannot_ask_anybody_and_a_served_one_only_its_server(page: str) -> None:
    assert "fetch(" not in page
    live = render(data_of(page), live=True)
    assert "fetch(" in live
    assert "connect-src 'self'" in live


def test_every_script_is_part_of_the_page_and_none_parses_markup() -> None:
    names = {path.name for path in STATIC.glob("*.js")}
    assert names == {*SCRIPTS, "live.js", "main.js"}
    for name in names:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(", static(name)), name


def test_two_runs_are_compared_on_the_same_tokens(page: str) -> None:
    first, second = data_of(page)["runs"]
    assert first["routing"]["sample"] == second["routing"]["sample"] == 0
    assert [layer["adaptive"] for layer in first["routing"]["layers"]] == [False] * 3
    # Nothing stands before the first MoE layer, so that one is plain in both.
    assert [layer["adaptive"] for layer in second["routing"]["layers"]] == [False, True, True]
    count = len(data_of(page)["samples"][0]["tokens"])
    for run in (first, second):
        for layer in run["routing"]["layers"]:
            assert len(layer["first"]) == len(layer["affinity"]) == len(layer["cluster"]) == count
            assert [len(row) for row in layer["affinity"]] == [4] * count
    assert first["difference"] is None
    best = [run["best"]["value"] for run in (first, second)]
    assert second["difference"]["value"] == pytest.approx(best[1] - best[0])


def test_clusters_are_the_first_choices_of_the_layer_before(page: str) -> None:
    layers = data_of(page)["runs"][1]["routing"]["layers"]
    assert set(layers[0]["cluster"]) == {-1}
    assert layers[1]["cluster"] == layers[0]["first"]
    assert layers[2]["cluster"] == layers[1]["first"]
    assert layers[0]["deviation"] == 0
    assert all(features == [] for features in layers[0]["stretched"])


def test_the_chosen_experts_are_those_of_the_highest_affinity(page: str) -> None:
    for run in data_of(page)["runs"]:
        layer = run["routing"]["layers"][1]
        for row, ids, first in zip(layer["affinity"], layer["ids"], layer["first"], strict=True):
            assert row[first] == max(row)
            assert first in ids


def test_the_most_stretched_features_come_first(page: str) -> None:
    layer = data_of(page)["runs"][1]["routing"]["layers"][1]
    listed = [features for features in layer["stretched"] if features]
    assert listed
    for features in listed:
        scales = [scale for _, scale in features]
        assert scales == sorted(scales, reverse=True)
        assert scales[0] > 1  # the mean over features is 1
        assert len(features) == 6


def test_loads_add_up_and_the_first_layer_has_no_instability(page: str) -> None:
    for run in data_of(page)["runs"]:
        measures = run["routing"]["measures"]
        assert measures[0]["instability"] is None
        for one in measures:
            assert sum(one["load"]) == pytest.approx(100)
        for one in measures[1:]:
            assert 0 <= one["instability"] <= 1


def test_a_plain_router_stands_beside_the_base_of_an_adaptive_one(page: str) -> None:
    settings = {row["key"]: row for row in data_of(page)["settings"]}
    assert settings["model.router.name"]["values"] == ['"smoe"', '"adaptive"']
    assert settings["model.router.base.name"]["values"] == ['"smoe"', '"smoe"']
    assert not settings["model.router.base.bias"]["differs"]
    assert settings["model.router.measure"]["values"] == [None, '"mad"']
    assert not settings["model.router.measure"]["differs"]  # an option of one router
    assert settings["model.router.measure"]["only"] == [1]
    assert [key for key, row in settings.items() if row["differs"]] == ["model.router.name"]
    assert not settings["lr"]["differs"]


def test_runs_of_the_same_kind_of_router_keep_their_own_names() -> None:
    runs = [run_facts({1: 1.0}, **{"model.router.bias": True}) for _ in range(2)]
    assert aligned_settings(runs) == [run.settings for run in runs]


def test_two_short_runs_stay_far_below_five_megabytes(page: str) -> None:
    assert len(page.encode()) < 2_000_000


def test_many_runs_share_the_room_of_a_page(two_runs: tuple[Path, Path]) -> None:
    reader = RoutingReader(tokens=640, device="cpu")
    # 3 layers of 4 experts, as if a thousand runs were on the page: 50 tokens, but never below 64.
    assert MOST_AFFINITIES // (1000 * 12) == 50
    routing = reader.read(read_run(two_runs[0], "run"), 1000)
    assert not isinstance(routing, str)
    assert routing.sample.count == 64


def test_a_checkpoint_is_read_once_until_another_is_there(two_runs: tuple[Path, Path]) -> None:
    reader, run = RoutingReader(tokens=16, device="cpu"), read_run(two_runs[0], "run")
    assert reader.read(run, 1) is reader.read(run, 1)
    assert reader.read(run, 1) is not reader.read(run, 2)


@pytest.fixture
def broken(two_runs: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_runs[1], tmp_path / "broken"))


def notes_of(*folders: Path) -> list[str]:
    path, notes = write_report(folders, folders[-1] / "report.html", tokens=16, device="cpu")
    data = data_of(path.read_text(encoding="utf-8"))
    assert len(data["runs"]) == len(folders)  # nobody is left out
    return notes


def test_a_run_without_a_checkpoint_is_shown_with_what_it_has(
    two_runs: tuple[Path, Path], broken: Path
) -> None:
    shutil.rmtree(broken / "checkpoints")
    (note,) = notes_of(two_runs[0], broken)
    assert note.startswith("broken: no routing: ")
    assert "has no checkpoint yet" in note


def test_a_checkpoint_of_another_model_is_one_line(broken: Path) -> None:
    for path in broken.glob("checkpoints/step-*/config.json"):
        document = json.loads(path.read_text())
        document["model"]["num_experts"] = 2
        path.write_text(json.dumps(document))
    (note,) = notes_of(broken)
    assert "no routing: " in note
    assert "\n" not in note


def test_a_corpus_that_is_gone_is_one_line(broken: Path) -> None:
    path = broken / "config.json"
    document = json.loads(path.read_text())
    document["config"]["data"]["folder"] = str(broken / "gone")
    del document["seal"]
    write_sealed(path, document)
    (note,) = notes_of(broken)
    assert "gone, which " in note
    assert "was trained on, is missing; move it back, or put a link to its new place" in note


def test_a_page_that_cannot_be_written_is_named(broken: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/page.html: "):
        write_report([broken], tmp_path / "file" / "page.html", tokens=16, device="cpu")


def test_image_runs_show_patches_in_the_grid_of_each_stage(image_data: dict[str, Any]) -> None:
    (sample,) = image_data["samples"]  # the same images in all runs
    assert len(sample["images"]) == 12
    for run in image_data["runs"][:2]:
        grids = [tuple(layer["grid"]) for layer in run["routing"]["layers"]]
        assert grids[0] == (4, 4) and grids[-1] == (2, 2)
        for layer, (rows, columns) in zip(run["routing"]["layers"], grids, strict=True):
            assert len(layer["first"]) == 12 * rows * columns
        assert len(run["routing"]["predicted"]) == 12
        assert run["metric"]["key"] == "top1"
