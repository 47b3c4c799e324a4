"""Every variant of the nano size trains and is scored, without a data folder."""

import json
from pathlib import Path

import pytest

from acmoe.config.moved import VARIANT_FIELDS
from acmoe.config.routing import AdaptiveConfig
from acmoe.config.serialize import decode, encode
from acmoe.lab.study.cell import without_paths
from acmoe.lab.study.grids.grid import as_recorded
from acmoe.lab.study.grids.variants import VARIANTS
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.size import Size
from acmoe.lab.study.worker import run_cell
from acmoe.lab.variants import VariantConfig
from acmoe.lab.variants.config import as_in_0_1

SMALL = (
    *("model.dim=16", "model.hidden=16", "model.heads=2", "model.block=16", "model.span=16"),
    *("model.repeats=2", "eval_tokens=100", "log_every=1"),
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variants")


def nano_cells(work: Path, steps: int):
    size = Size(steps=steps, batch=2, tokens=100, megabytes=0.01, overrides=SMALL, device="cpu")
    materials = Materials(data=Path("nowhere"), work=work)
    return STUDIES["remedies"].cells(materials, size, (0,), settings=("nano",))


@pytest.mark.slow
def test_every_variant_has_a_finite_figure_at_the_nano_size(work: Path) -> None:
    cells = nano_cells(work, steps=2)
    assert [cell.condition for cell in cells] == list(VARIANTS)
    for cell in cells:
        metrics = run_cell(cell, work, lambda text: None)["metrics"]
        assert 1 < metrics["test"] < 20
        if VARIANTS[cell.condition].router is not None:
            assert metrics["scale_rms_log"] > 0  # of a learned lambda, too


def test_a_strength_that_falls_reaches_its_end_with_the_run(work: Path) -> None:
    routers = {cell.condition: cell.config.model.router for cell in nano_cells(work, steps=7)}
    falling = routers["strength-falling"]
    assert isinstance(falling, VariantConfig)
    assert (falling.strength, falling.strength_end, falling.strength_steps) == (100.0, 1.0, 7)
    fixed = routers["strength-10"]
    assert type(fixed) is AdaptiveConfig  # one that the paper has
    assert fixed.strength == 10.0


def test_plain_descent_of_the_router_is_asked_for_in_the_run(work: Path) -> None:
    for cell in nano_cells(work, steps=2):
        wanted = "sgd" if cell.condition.endswith("-sgd") else "adam"
        assert cell.config.router_optimizer == wanted


RECORDS = sorted((Path(__file__).parents[3] / "studies" / "records").glob("*.jsonl"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_routers_of_all_records_are_encoded_as_they_were(path: Path) -> None:
    """A cell finds its record by a digest of its encoded config."""
    lines = path.read_text(encoding="utf-8").splitlines()
    configs = [json.loads(line)["config"] for line in lines]
    routers = [(config.get("model") or config)["router"] for config in configs]
    adaptive = [router for router in routers if router["name"] == "adaptive"]
    assert adaptive
    for stored in adaptive:
        config = decode(stored, AdaptiveConfig, str(path))
        plain = all(stored[name] == VARIANT_FIELDS[name] for name in VARIANT_FIELDS)
        assert type(config) is (AdaptiveConfig if plain else VariantConfig)
        assert without_paths(as_in_0_1(encode(config))) == stored


@pytest.mark.parametrize(
    ("study", "condition", "preset"),
    [
        ("bytes", "reference-lm", "reference-lm"),
        ("nano", "reference-lm", "reference-lm"),
        ("nano", "published", "reference-swin"),
    ],
)
def test_published_conditions_are_the_presets_as_they_were_recorded(study, condition, preset):
    """The presets have changed since; the conditions must not."""
    (path,) = [path for path in RECORDS if path.stem == study]
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    stored = [
        line["config"]["model"]["router"] for line in records if line["condition"] == condition
    ]
    assert stored
    wanted = without_paths(as_in_0_1(encode(as_recorded(preset))))
    assert all(router == wanted for router in stored)


def test_cells_find_the_records_of_version_0_1() -> None:
    (path,) = [path for path in RECORDS if path.stem == "synthetic"]
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    known = {record["digest"] for record in records}
    materials = Materials(data=Path("nowhere"), work=Path("nowhere"))
    cells = STUDIES["synthetic"].cells(materials, Size(), (0,))
    assert any(isinstance(cell.config.router, VariantConfig) for cell in cells)
    added = {"distance", "nearest", "oracle-distance"}  # conditions that version 0.1 did not have
    assert added <= {cell.condition for cell in cells}
    assert {cell.digest for cell in cells if cell.condition not in added} <= known
