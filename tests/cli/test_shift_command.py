"""`acmoe shift` on a run of class folders, and on trees laid out as ImageNet-A, -R and -O."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from acmoe.config.images.data import ImageDataConfig
from command_call import call
from tiny_vision_runs import tiny_vision_run, trained_images

WNIDS = ("n01440764", "n02102040", "n03000684", "n03028079")


def write_images(root: Path, names, each: int, seed: int) -> None:
    """Class k has the value 60 k, plus noise: separable by brightness."""
    draw = np.random.default_rng(seed)
    for name in names:
        folder = root / name
        folder.mkdir(parents=True)
        for number in range(each):
            level = 60 * WNIDS.index(name) + draw.integers(0, 30, (8, 8, 3))
            Image.fromarray(level.astype(np.uint8)).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_images(root / "data" / "train", WNIDS, 12, seed=0)
    write_images(root / "data" / "val", WNIDS, 6, seed=1)
    write_images(root / "shifted", WNIDS[:2], 5, seed=2)
    base = tiny_vision_run()
    data = ImageDataConfig(name="folder", source=str(root / "data"), size=8, threads=1)
    config = replace(base, data=data, eval_images=24, model=replace(base.model, num_classes=4))
    trained_images(config, root / "run")
    return root


def test_accuracy_is_over_the_classes_of_the_shifted_set(capsys, tree):
    last = ("--which", "last", "--json")
    where = ("--set", "imagenet-a", "--from", tree / "shifted")
    code, out, _ = call(capsys, "shift", tree / "run", *where, *last)
    report = json.loads(out)
    assert code == 0
    assert report["step"] == 12
    assert report["metric"] == "top-1 accuracy (%)"
    assert report["images"] == 10  # 2 classes of 5
    assert report["classes"] == 2
    assert report["chance"] == 50.0  # one of two classes
    assert 0 <= report["value"] <= 100


def test_detection_is_against_the_clean_images_of_the_same_classes(capsys, tree):
    code, out, _ = call(
        capsys, "shift", tree / "run", "--set", "imagenet-o", "--from", tree / "shifted", "--json"
    )
    report = json.loads(out)
    assert code == 0
    assert report["metric"] == "AUPR (%)"
    assert (report["images"], report["clean_images"]) == (10, 12)  # 2 classes of 6 in val
    assert report["chance"] == pytest.approx(100 * 10 / 22)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_source_that_is_no_folder_is_named_with_its_option(capsys, tree, tmp_path, name):
    (tmp_path / "file").write_text("")
    where = ("--set", "imagenet-a", "--from", tmp_path / name)
    code, out, err = call(capsys, "shift", tree / "run", *where)
    assert (code, out) == (2, "")
    assert err == (
        f"acmoe: --from {tmp_path / name} is no folder; give that of imagenet-a, with one folder "
        "per class\n"
    )


def test_a_folder_that_is_no_class_of_the_model_is_named(capsys, tree, tmp_path):
    (tmp_path / "n09999999").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "n09999999" / "0.png")
    code, out, err = call(capsys, "shift", tree / "run", "--set", "imagenet-r", "--from", tmp_path)
    assert code == 2
    assert out == ""
    assert "n09999999" in err
    assert err.count("\n") == 1
