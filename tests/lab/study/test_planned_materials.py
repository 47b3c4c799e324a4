"""Cells of data sets that are only looked at are those of the prepared ones, but for the data."""

from pathlib import Path

import numpy as np
import pytest

from acmoe.errors import UserError
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.materials import FILES, Materials
from acmoe.lab.study.planned import PlannedMaterials
from acmoe.lab.study.registry import STUDIES, study_of
from acmoe.lab.study.size import Size
from study_cases import data_folder

WORDS = "the red cat saw the blue dog\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All data sets of the studies, as small as they can be."""
    folder = data_folder(tmp_path_factory.mktemp("data"))
    for name in ("enwiki15-words", "wikitext103", "imagenette", "sst2", "sst5", "banking77"):
        (folder / name).mkdir()
    for split in ("train_00", "valid", "test"):
        (folder / "enwiki15-words" / f"{split}.txt").write_text(WORDS * 9)
    (folder / "wikitext103" / "wiki.valid.tokens").write_text(WORDS * 9)
    generator = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 10)):
        images = generator.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        path = folder / "imagenette" / f"{split}.npz"
        np.savez(path, images=images, labels=np.arange(count) % 10)
    return folder


def described(cell: Cell) -> tuple[object, ...]:
    return cell.study, cell.setting, cell.condition, cell.seed, cell.size, dict(cell.factors)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("bytes", Size(megabytes=0.01)),
        ("words", Size(parts=1, vocabulary=20, brief=True)),
        ("vision", Size(overrides=("model.dim=24",))),
        ("nano", Size(megabytes=0.2)),
    ],
)
def test_planned_cells_are_those_of_the_study_and_nothing_is_written(
    name: str, size: Size, data: Path, tmp_path: Path
) -> None:
    study, where = study_of(name), {"data": data, "work": tmp_path / "work"}
    planned = study.cells(PlannedMaterials(**where), size, (0, 1))
    assert not (tmp_path / "work").exists()
    prepared = study.cells(Materials(**where), size, (0, 1))
    assert [described(cell) for cell in planned] == [described(cell) for cell in prepared]
    assert (tmp_path / "work").exists()
    again = study.cells(PlannedMaterials(**where), size, (0, 1))  # of what is prepared now
    assert [described(cell) for cell in again] == [described(cell) for cell in planned]


def test_files_of_words_that_are_not_there_are_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--parts 2, but .* has 1 files train_"):
        PlannedMaterials(data=data, work=tmp_path).words(2, 20)


class Noting(PlannedMaterials):
    """Notes the folders that a study asks for."""

    def _folder(self, name: str) -> Path:
        READ.append(name)
        return super()._folder(name)


READ: list[str] = []


def test_the_page_of_the_data_says_which_study_reads_which_folder(
    data: Path, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[3] / "docs/howto/study-data.md").read_text(encoding="utf-8")
    rows = {
        name: line.split("|")[3]
        for line in page.splitlines()
        if line.startswith("| `")
        for name in FILES
        if f"`{name}`" in line.split("|")[1]
    }
    assert set(rows) == set(FILES)
    rows["enwik8-prefix"] = rows["enwiki15-bytes"]  # the page says "the same"
    rows["wikitext103"] = rows["enwiki15-words"]
    size = {"vision": Size(overrides=("model.dim=24",))}
    for name, study in STUDIES.items():
        READ.clear()
        small = size.get(name, Size(parts=1) if "words" in name or name == "ablations" else Size())
        study.cells(Noting(data=data, work=tmp_path), small, study.own_seeds[:1])
        assert set(READ) == {folder for folder, row in rows.items() if f"`{name}`" in row}, name
