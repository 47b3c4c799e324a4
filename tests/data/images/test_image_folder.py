"""A tree of class folders is read as ImageNet's loaders read it; what is wrong is named."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from acmoe.config.images.data import ImageDataConfig
from acmoe.data.images import probe
from acmoe.data.images.folder import open_folder, open_splits
from acmoe.data.images.load import load_images
from acmoe.errors import UserError
from vision_cases import random_pixels


def tree(root: Path, split: str, classes: Sequence[str], each: int = 2) -> None:
    for place, name in enumerate(classes):
        (root / split / name).mkdir(parents=True)
        for number in range(each):
            pixels = random_pixels((10, 12, 3), seed=100 * place + number)
            Image.fromarray(pixels).save(root / split / name / f"{number}.PNG")


def test_classes_are_the_sorted_folder_names_and_files_are_sorted(tmp_path: Path) -> None:
    tree(tmp_path, "train", ["n02", "n01"], each=3)
    tree(tmp_path, "val", ["n02"])
    (tmp_path / "train" / "n01" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    splits = open_splits(tmp_path)
    assert splits["train"].classes == splits["valid"].classes == ("n01", "n02")
    assert splits["train"].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert splits["valid"].labels.tolist() == [1, 1]
    assert [Path(file).name for file in splits["train"].files[:3]] == ["0.PNG", "1.PNG", "2.PNG"]
    # n02 was drawn first, so its files have the seeds 0 to 2.
    assert np.array_equal(splits["train"].pixels(4), random_pixels((10, 12, 3), seed=1))
    assert splits["train"].where(4).endswith("train/n02/1.PNG")


def test_images_in_folders_of_a_class_are_read_as_torchvision_reads_them(tmp_path: Path) -> None:
    tree(tmp_path, "train", ["a", "b"])
    for inner in ("images", ".cache"):  # Tiny ImageNet has CLASS/images/file
        (tmp_path / "train" / "a" / inner).mkdir()
        Image.fromarray(random_pixels((4, 4, 3))).save(tmp_path / "train" / "a" / inner / "9.png")
    (tmp_path / "train" / "b" / "more").symlink_to(tmp_path / "train" / "a" / "images")
    images = open_folder(tmp_path / "train")
    below = [str(Path(file).relative_to(tmp_path / "train")) for file in images.files]
    assert below == ["a/0.PNG", "a/1.PNG", "a/images/9.png", "b/0.PNG", "b/1.PNG", "b/more/9.png"]
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    (tmp_path / "train" / "b" / "circle").symlink_to(tmp_path / "train")
    with pytest.raises(UserError, match="b/circle is a link to a folder that holds it; remove"):
        open_folder(tmp_path / "train")


def test_files_that_are_not_read_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree(tmp_path, "train", ["a", "b"])
    open_folder(tmp_path / "train")
    assert not caplog.messages
    (tmp_path / "train" / "a" / ".DS_Store").write_text("hidden")
    for name in ("a/photo.heic", "b/boxes.txt"):
        (tmp_path / "train" / name).write_text("no image that is read")
    (tmp_path / "train" / "z.png").write_text("in no class")
    (tmp_path / "train" / "README.txt").write_text("no image, and in no class")
    assert len(open_folder(tmp_path / "train")) == 4
    (said,) = caplog.messages
    assert "train: 3 files are not read, such as " in said and "a/photo.heic; images lie" in said
    tree(tmp_path, "val", ["a"])
    load_images(ImageDataConfig(name="folder", source=str(tmp_path), size=8), warn=False)
    assert caplog.messages == [said]


def test_a_config_gives_three_splits_of_a_tree(tmp_path: Path) -> None:
    tree(tmp_path, "train", ["a", "b"], each=10)
    tree(tmp_path, "val", ["a", "b"])
    plain = load_images(ImageDataConfig(name="folder", source=str(tmp_path), size=8))
    assert (len(plain.train), len(plain.valid), len(plain.test)) == (20, 4, 4)
    config = ImageDataConfig(name="folder", source=str(tmp_path), size=8, holdout=0.2)
    kept = load_images(config)
    # 2 of the 10 of each class; the tree's own validation images are then the test.
    assert np.bincount(kept.valid.labels).tolist() == [2, 2]
    assert np.bincount(kept.train.labels).tolist() == [8, 8]
    assert kept.test.where(0).startswith(str(tmp_path / "val"))
    names = {kept.train.where(i) for i in range(16)} | {kept.valid.where(i) for i in range(4)}
    assert len(names) == 20


def test_two_folders_for_one_split_are_refused(tmp_path: Path) -> None:
    for split in ("train", "val", "validation"):
        tree(tmp_path, split, ["a", "b"])
    with pytest.raises(UserError, match="has val, validation for one split; keep one"):
        open_splits(tmp_path)


def test_loose_test_images_without_labels_are_left_alone(tmp_path: Path) -> None:
    tree(tmp_path, "train", ["a"])
    tree(tmp_path, "val", ["a"])
    (tmp_path / "test").mkdir()
    Image.fromarray(random_pixels((4, 4, 3))).save(tmp_path / "test" / "1.JPEG")
    assert set(open_splits(tmp_path)) == {"train", "valid"}


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    tree(tmp_path, "train", ["a", "b"])
    (tmp_path / "train" / "c").mkdir()
    with pytest.raises(UserError, match=r"train/c holds no images \(\.jpeg, .*remove the class"):
        open_splits(tmp_path)


def test_a_class_nobody_trained_on_is_named(tmp_path: Path) -> None:
    tree(tmp_path, "train", ["a", "b"])
    tree(tmp_path, "val", ["a", "z"])
    with pytest.raises(UserError, match="val/z is not among the 2 classes trained on"):
        open_splits(tmp_path)


def test_images_outside_class_folders_are_explained(tmp_path: Path) -> None:
    Image.fromarray(random_pixels((4, 4, 3))).save(tmp_path / "1.JPEG")
    with pytest.raises(UserError, match="holds images outside class folders; sort"):
        open_folder(tmp_path)


def test_missing_folders_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is no folder"):
        open_splits(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no folder train"):
        open_splits(tmp_path)
    with pytest.raises(UserError, match="cannot list"):
        open_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no class folders"):
        open_folder(tmp_path)
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.fromarray(random_pixels((4, 4, 3))).save(tmp_path / "train" / "a" / "1.png")
    with pytest.raises(UserError, match=r"has neither a val nor a test split; .*holdout=0\.1"):
        load_images(ImageDataConfig(name="folder", source=str(tmp_path)))
    with pytest.raises(UserError, match=r"holdout=0\.1 of 1 training images is none"):
        load_images(ImageDataConfig(name="folder", source=str(tmp_path), holdout=0.1))


def test_a_broken_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    tree(tmp_path, "train", ["a"])
    (tmp_path / "train" / "a" / "0.PNG").write_bytes(b"not an image")
    images = open_folder(tmp_path / "train")
    with pytest.raises(UserError, match=r"train/a/0\.PNG is no readable image"):
        images.pixels(0)
    assert images.pixels(1).shape == (10, 12, 3)


def test_beyond_a_thousand_images_the_header_of_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "DECODED", 1)
    tree(tmp_path, "train", ["a"], each=3)
    last = tmp_path / "train" / "a" / "2.PNG"
    last.write_bytes(last.read_bytes()[:50])  # cut off: only decoding would find it
    images = open_folder(tmp_path / "train").subset(np.array([0, 1, 2]))
    probe.probe_images(images, np.arange(3), threads=2)
    with pytest.raises(UserError, match=r"a/2\.PNG is no readable image"):
        probe.probe_images(images, np.array([2, 0, 1]), threads=2)
    last.write_bytes(b"")
    with pytest.raises(UserError, match=r"a/2\.PNG is no readable image"):
        probe.probe_images(images, np.arange(3), threads=2)


def test_a_link_to_nothing_is_named_when_it_is_read(tmp_path: Path) -> None:
    tree(tmp_path, "train", ["a"])
    (tmp_path / "train" / "a" / "9.png").symlink_to(tmp_path / "nowhere.png")
    images = open_folder(tmp_path / "train")
    with pytest.raises(UserError, match=r"a/9\.png is a link to a missing file; restore the file"):
        images.pixels(2)
    (tmp_path / "train" / "a" / "0.PNG").unlink()
    with pytest.raises(UserError, match=r"a/0\.PNG is missing, and was there before"):
        images.pixels(0)
