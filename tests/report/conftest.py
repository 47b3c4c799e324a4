"""Two short runs, a plain and an adaptive router, on a text that tries to break out of a page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from acmoe.data.text.prepare import prepare
from acmoe.report.page import write_report
from run_facts import HOSTILE
from tiny_runs import tiny_run, trained
from tiny_vision_runs import tiny_vision_run, trained_images


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report-corpus")
    source = folder / "source.txt"
    source.write_text("".join(f"{HOSTILE} line {n}\n" for n in range(300)), encoding="utf-8")
    prepare("bytes", source, folder / "corpus")
    return folder / "corpus"


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("report-runs")
    plain = trained(tiny_run(corpus, router="smoe"), folder / "plain")
    return plain, trained(tiny_run(corpus), folder / "adaptive")


@pytest.fixture(scope="session")
def image_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("report-images")
    plain = trained_images(tiny_vision_run("steps=4", router="smoe"), folder / "plain")
    return plain, trained_images(tiny_vision_run("steps=4"), folder / "adaptive")


@pytest.fixture(scope="session")
def soft_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report-soft")
    return trained_images(tiny_vision_run("steps=2", soft=True), folder / "soft")


@pytest.fixture(scope="session")
def text_report(two_runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the two runs on text."""
    path, notes = write_report(two_runs, tmp_path_factory.mktemp("report-text") / "report.html")
    assert notes == []
    return path


@pytest.fixture(scope="session")
def image_report(
    image_runs: tuple[Path, Path], soft_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The page of the two Swin runs and the run of SoftMoE."""
    out = tmp_path_factory.mktemp("report-images") / "report.html"
    path, notes = write_report([*image_runs, soft_run], out, device="cpu")
    assert notes == []
    return path


def embedded(report: Path) -> dict[str, Any]:
    """Return the data that a page holds."""
    page = report.read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    data: dict[str, Any] = json.loads(text)
    return data


@pytest.fixture(scope="session")
def text_data(text_report: Path) -> dict[str, Any]:
    return embedded(text_report)


@pytest.fixture(scope="session")
def image_data(image_report: Path) -> dict[str, Any]:
    return embedded(image_report)
