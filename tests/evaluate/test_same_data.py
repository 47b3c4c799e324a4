"""A run's figures are of the data it was trained on, or the difference is said."""

from pathlib import Path

import pytest
from PIL import Image

from acmoe.errors import UserError
from acmoe.evaluate.run import open_image_run
from acmoe.train.run import train_images
from tiny_vision_runs import QUIET, tiny_vision_run
from vision_cases import random_pixels


def test_images_whose_classes_were_renamed_or_added_are_told(tmp_path: Path) -> None:
    """Renamed, the classes have another order: the model would be scored on swapped labels."""
    tree = tmp_path / "tree"
    for place, name in enumerate(("train/a", "train/b", "val/a", "val/b")):
        (tree / name).mkdir(parents=True)
        for number in range(16):
            pixels = random_pixels((8, 8, 3), seed=100 * place + number)
            Image.fromarray(pixels).save(tree / name / f"{number}.png")
    images = ("data.name=folder", f"data.source={tree}")
    config = tiny_vision_run(*images, "model.num_classes=2", "steps=1", "eval_images=None")
    train_images(config, tmp_path / "run", console=QUIET)
    run = open_image_run(tmp_path / "run")
    run.images()
    (tree / "train" / "a" / "0.png").rename(tree / "train" / "b" / "more.png")
    with pytest.warns(UserWarning, match=r"tree holds other training images than .* was trained"):
        run.images()
    (tree / "train" / "b" / "more.png").rename(tree / "train" / "a" / "0.png")
    for split in ("train", "val"):
        (tree / split / "a").rename(tree / split / "c")
    with pytest.raises(UserError, match="tree has other classes than"):
        run.images()
    with pytest.raises(UserError, match=r"not the images this run was begun with \(other classes"):
        train_images(config, tmp_path / "run", console=QUIET)
    tree.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"tree, which .*run was trained on, is missing; move it"):
        run.images()
