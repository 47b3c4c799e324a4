"""Images in .npz files: pixels, or files end to end; damaged ones are named."""

import io
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from acmoe.config.images.data import ImageDataConfig
from acmoe.data.images.arrays import open_array_splits, open_arrays
from acmoe.data.images.load import load_images
from acmoe.errors import UserError
from vision_cases import random_pixels


def packed(count: int, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """PNG files end to end, in the arrays a .npz file would hold."""
    files = []
    for number in range(count):
        file = io.BytesIO()
        Image.fromarray(random_pixels((6, 5 + number, 3), seed + number)).save(file, "PNG")
        files.append(file.getvalue())
    arrays = {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "offset": np.cumsum([0, *map(len, files)]),
        "label": np.arange(count) % 2,
        "name": np.array([f"file{n}" for n in range(count)]),
    }
    return {key: value for key, value in {**arrays, **changes}.items() if value is not None}


def test_pixels_are_read_as_they_are_and_grey_ones_repeated(tmp_path: Path) -> None:
    pixels = random_pixels((4, 6, 6, 3))
    np.savez(tmp_path / "train.npz", images=pixels, labels=np.array([0, 2, 1, 0], np.uint8))
    np.savez_compressed(tmp_path / "val.npz", images=pixels[..., 0], labels=[2, 2, 2, 2])
    splits = open_array_splits(tmp_path)
    assert splits["train"].classes == ("0", "1", "2")
    assert splits["train"].labels.tolist() == [0, 2, 1, 0]
    assert np.array_equal(splits["train"].pixels(3), pixels[3])
    assert np.array_equal(splits["valid"].pixels(1), pixels[1][..., :1].repeat(3, -1))
    assert splits["valid"].where(1) == f"{tmp_path / 'val.npz'}, image 1"


def test_files_end_to_end_may_differ_in_size_and_be_compressed_as_a_whole(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("val", 3)):
        file = io.BytesIO()
        np.savez(file, **packed(count, seed=count))
        (tmp_path / f"{split}_112.npz.xz").write_bytes(lzma.compress(file.getvalue()))
    config = ImageDataConfig(name="arrays", source=str(tmp_path), size=4)
    splits = load_images(config)
    assert (len(splits.train), len(splits.test)) == (5, 3)
    assert np.array_equal(splits.train.pixels(3), random_pixels((6, 8, 3), 5 + 3))
    assert splits.train.where(3).endswith("train_112.npz.xz, image 3 (file3)")


def test_classes_may_be_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", classes=["cat", "dog"], **packed(4, name=None))
    images = open_arrays(tmp_path / "train.npz")
    assert images.classes == ("cat", "dog")
    assert images.where(0).endswith("train.npz, image 0")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["dog", "cat"], r"val\.npz: class 0 is 'dog', and 'cat' in the training images"),
        (["cat"], r"val\.npz: class 1 is None, and 'dog' in the training images"),
        ("cat", r"val\.npz: classes has shape \(\); give one name for each class"),
    ],
)
def test_splits_that_number_their_classes_otherwise_are_refused(
    tmp_path: Path, names: Any, message: str
) -> None:
    np.savez(tmp_path / "train.npz", classes=["cat", "dog"], **packed(4))
    np.savez(tmp_path / "val.npz", classes=["cat", "dog"], **packed(2))
    assert open_array_splits(tmp_path)["valid"].classes == ("cat", "dog")
    np.savez(tmp_path / "val.npz", classes=names, **packed(2))
    with pytest.raises(UserError, match=message):
        open_array_splits(tmp_path)


def test_a_label_out_of_range_is_named_with_its_image(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", **packed(4))
    np.savez(tmp_path / "val.npz", **packed(3, label=np.array([0, 5, 7])))
    with pytest.raises(UserError, match=r"val\.npz has label 5 at image 1, and 2 such .* to 1$"):
        open_array_splits(tmp_path)
    np.savez(tmp_path / "train.npz", **packed(2, label=np.array([0, -1])))
    with pytest.raises(UserError, match=r"train\.npz has label -1 at image 1"):
        open_arrays(tmp_path / "train.npz")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, share: float) -> None:
    path = tmp_path / "train.npz"
    np.savez(path, **packed(4))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"train\.npz is truncated or no \.npz file \(.*\); fetch"):
        open_arrays(path)


def test_a_file_truncated_within_its_compression_is_named(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez(file, **packed(4))
    path = tmp_path / "train.npz.xz"
    path.write_bytes(lzma.compress(file.getvalue())[:-40])
    with pytest.raises(UserError, match=r"train\.npz\.xz is truncated"):
        open_arrays(path)


def test_a_bare_array_is_explained(tmp_path: Path) -> None:
    with (tmp_path / "train.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match=r"train\.npz holds one bare array"):
        open_arrays(tmp_path / "train.npz")


def test_objects_that_would_run_code_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", images=np.array([{}], dtype=object), labels=[0])
    with pytest.raises(UserError, match=r"truncated or no \.npz file"):
        open_arrays(tmp_path / "train.npz")


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"pictures": np.zeros(3)}, "has arrays pictures; it needs images and labels"),
        (packed(3, offset=None), "has arrays jpeg, label, name; it needs"),
        (packed(3, label=np.zeros(3)), "label is float64 of shape"),
        (packed(3, label=np.zeros(0, int)), r"label is int64 of shape \(0,\)"),
        (packed(3, offset=np.array([0, 10])), r"offset is int64 of shape \(2,\); 3 labels need 4"),
        (packed(3, offset=np.array([0, 9, 5, 20])), "offset does not rise from 0 to the"),
        (packed(3, jpeg=np.zeros(9)), "jpeg is float64"),
        (packed(3, name=np.array(["a"])), r"name has shape \(1,\); give 3 names"),
        ({"images": np.zeros((2, 4, 4, 3)), "labels": [0, 1]}, "images is float64"),
        ({"images": np.zeros((2, 4, 4, 3), np.uint8), "labels": [0]}, "2 images and 1 labels"),
        ({"images": np.zeros((2, 4, 4, 5), np.uint8), "labels": [0, 0]}, "with 1, 3 or 4 channels"),
    ],
)
def test_arrays_that_do_not_fit_together_are_explained(
    tmp_path: Path, arrays: dict[str, Any], complaint: str
) -> None:
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(UserError, match=complaint):
        open_arrays(tmp_path / "train.npz")


def test_missing_and_doubled_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is no folder"):
        open_array_splits(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no train\.npz"):
        open_array_splits(tmp_path)
    with pytest.raises(UserError, match="is not a file"):
        open_arrays(tmp_path / "train.npz")
    for name in ("train_32.npz", "train_64.npz", "trainer.npz"):
        np.savez(tmp_path / name, **packed(2))
    with pytest.raises(UserError, match=r"has train_32\.npz, train_64\.npz for one split"):
        open_array_splits(tmp_path)
    (tmp_path / "train_64.npz").unlink()
    for name in ("val.npz", "valid_32.npz"):
        np.savez(tmp_path / name, **packed(2))
    with pytest.raises(UserError, match=r"has val\.npz, valid_32\.npz for one split"):
        open_array_splits(tmp_path)


def test_a_broken_image_inside_is_named(tmp_path: Path) -> None:
    arrays = packed(3)
    jpeg = arrays["jpeg"].copy()
    jpeg[arrays["offset"][1] : arrays["offset"][2]] = 0
    np.savez(tmp_path / "train.npz", **{**arrays, "jpeg": jpeg})
    images = open_arrays(tmp_path / "train.npz")
    with pytest.raises(UserError, match=r"train\.npz, image 1 \(file1\) is no readable image"):
        images.pixels(1)
