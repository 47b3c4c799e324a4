"""Two short runs, a plain and an adaptive router, on a text that tries to break out of a page."""

from pathlib import Path

import pytest

from acmoe.data.text.prepare import prepare
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
