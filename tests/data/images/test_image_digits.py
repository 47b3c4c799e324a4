"""The default images, and the splits every source is dealt into."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acmoe.config.images.data import ImageDataConfig
from acmoe.data.images.digits import load_digit_splits
from acmoe.data.images.load import load_images
from acmoe.data.images.splits import ImageSet, make_splits, stratified
from acmoe.errors import UserError
from vision_cases import random_images


def test_digits_are_split_within_each_class_and_every_image_is_used_once() -> None:
    splits = load_images(ImageDataConfig())
    assert splits.classes == tuple("0123456789")
    sizes = [len(splits[split]) for split in ("train", "valid", "test")]
    assert sum(sizes) == 1797
    # A class has 174 to 183 images: 26 or 27 of them are 15 %.
    for split in ("valid", "test"):
        counts = np.bincount(splits[split].labels, minlength=10)
        assert set(counts) <= {26, 27}
    parts = [splits[split].indices for split in ("train", "valid", "test")]
    assert sorted(np.concatenate(parts)) == list(range(1797))


def test_the_same_seed_gives_the_same_split_and_another_seed_another() -> None:
    first, again, other = (load_digit_splits(size=8, seed=seed) for seed in (3, 3, 4))
    assert first.test.indices.tolist() == again.test.indices.tolist()
    assert first.test.indices.tolist() != other.test.indices.tolist()


def test_every_pixel_of_a_digit_is_repeated() -> None:
    small, large = (load_digit_splits(size=size).train for size in (8, 24))
    tiny, big = small.pixels(5), large.pixels(5)
    assert tiny.shape == (8, 8, 3) and big.shape == (24, 24, 3)
    for dy in range(3):
        for dx in range(3):
            assert np.array_equal(big[dy::3, dx::3], tiny)
    # Ink runs from 0 to 16, stored as 0 to 255: 16 levels apart.
    whole = np.stack([small.pixels(i) for i in range(200)])
    assert whole.max() == 255 and len(np.unique(whole)) <= 17


def test_digits_need_a_multiple_of_eight() -> None:
    with pytest.raises(UserError, match=r"size=30 is no multiple of the digits' 8 pixels; use 32"):
        ImageDataConfig(size=30)
    with pytest.raises(UserError, match="size=9 is no multiple of 8"):
        load_digit_splits(size=9)


def test_without_scikit_learn_the_install_line_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install 'acmoe\[vision\]'"):
        load_digit_splits(size=8)


def test_without_pillow_the_install_line_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from acmoe.data.images.pixels import decode

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"pip install 'acmoe\[vision\]'"):
        decode(b"", "x")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 5))
def test_parts_are_disjoint_complete_and_as_large_as_asked_in_every_class(
    labels: list[int], seed: int
) -> None:
    array = np.asarray(labels)
    parts = stratified(array, (0.3, 0.2), seed=seed)
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    for label in set(labels):
        own = labels.count(label)
        counts = [int((array[part] == label).sum()) for part in parts]
        assert counts[:2] == [int(0.3 * own), int(0.2 * own)]


def test_one_evaluation_split_serves_as_both() -> None:
    train, valid = random_images([0, 1]), random_images([1])
    splits = make_splits(train, valid, None, holdout=0, seed=0)
    assert splits.valid is valid and splits.test is valid
    test = random_images([0])
    splits = make_splits(train, valid, test, holdout=0, seed=0)
    assert splits.valid is valid and splits.test is test
    splits = make_splits(random_images([0] * 10), None, None, holdout=0.5, seed=0)
    assert len(splits.train) == len(splits.valid) == len(splits.test) == 5
    with pytest.raises(UserError, match="split='dev' is unknown; choose one of train, valid, test"):
        splits["dev"]


def test_a_new_store_must_say_how_it_reads() -> None:
    images = ImageSet(title="x", classes=["a"], labels=[0])
    with pytest.raises(NotImplementedError, match="ImageSet must define pixels"):
        images.pixels(0)
    with pytest.raises(NotImplementedError, match="ImageSet must define where"):
        images.where(0)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": "folder"}, "data.source=None with data.name=folder"),
        ({"source": "x"}, "data.source='x' with data.name=digits"),
        ({"name": "web"}, "data.name='web' is unknown"),
        ({"size": 0}, "data.size=0"),
        ({"resize": 40}, "digits are not cropped"),
        ({"name": "folder", "source": "x", "size": 224, "resize": 200}, "resize=200 leaves less"),
        ({"holdout": 0.1}, "digits have a fixed split"),
        ({"name": "folder", "source": "x", "holdout": 1.0}, "data.holdout=1.0"),
        ({"threads": 0}, "data.threads=0"),
        ({"seed": -1}, "data.seed=-1"),
        ({"std": (1.0, 0.0, 1.0)}, "each must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        ImageDataConfig(**settings)


def test_photographs_are_cut_as_256_to_224_and_normalised_as_imagenet() -> None:
    config = ImageDataConfig(name="folder", source="x", size=224)
    assert config.shorter_side == 256
    assert config.normalization == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    own = ImageDataConfig(name="folder", source="x", mean=(0.5,) * 3, std=(0.2,) * 3, resize=99)
    assert own.shorter_side == 99 and own.normalization == ((0.5,) * 3, (0.2,) * 3)


def test_the_digits_normalisation_is_their_mean_and_deviation() -> None:
    splits = load_digit_splits(size=8)
    whole = splits.train.whole.grey / 255
    mean, std = ImageDataConfig().normalization
    assert abs(whole.mean() - mean[0]) < 1e-3 and abs(whole.std() - std[0]) < 1e-3
