"""Batches are the same for the same seed, whatever resumes them, reads ahead or shares them out."""

import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from taken_batches import same, take

from acmoe.config.images.data import AugmentConfig, ImageDataConfig
from acmoe.data.images.batches import EvaluationImages, ImageBatch, TrainingImages
from acmoe.data.images.on_device import DeviceImages
from acmoe.data.images.pixels import Pixels
from acmoe.data.images.splits import ImageSet
from acmoe.data.sharding import rank_rows
from acmoe.errors import UserError
from vision_cases import PLAIN, random_images

CROPPED = AugmentConfig(crop=(0.3, 1.0))


class Numbered(ImageSet):
    """Images that say their own number in the first pixel, and count how often they are read."""

    def __init__(self, count: int) -> None:
        super().__init__(title="numbered", classes=tuple("ab"), labels=np.arange(count) % 2)
        self.reads = [0] * count
        self.lock = threading.Lock()

    def pixels(self, index: int) -> Pixels:
        with self.lock:
            self.reads[index] += 1
        return np.full((8, 8, 3), index, np.uint8)

    def where(self, index: int) -> str:
        return f"image {index}"


def numbers(batch: ImageBatch) -> list[int]:
    return batch.images[:, 0, 0, 0].tolist()


def test_each_pass_reads_every_image_at_most_once_in_another_order() -> None:
    # 10 images make 3 batches of 3 a pass, one image is left out of each.
    found = take(TrainingImages(Numbered(10), PLAIN, AugmentConfig(), batch=3), 6)
    first, second = (
        [n for batch in part for n in numbers(batch)] for part in (found[:3], found[3:])
    )
    assert len(set(first)) == len(set(second)) == 9
    assert first != second and first != sorted(first)
    for batch in found:
        assert batch.labels.tolist() == [n % 2 for n in numbers(batch)]
        assert batch.images.shape == (3, 3, 8, 8) and batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous()
    assert len({batch.seed for batch in found}) == 6


@settings(max_examples=8)
@given(st.integers(0, 12), st.integers(1, 4), st.integers(0, 3))
def test_a_resumed_run_reads_bit_by_bit_what_it_would_have_read(
    stop: int, threads: int, seed: int
) -> None:
    images = random_images([n % 10 for n in range(11)], side=13)
    data = ImageDataConfig(name="arrays", source="x", size=8, threads=threads)
    whole = take(TrainingImages(images, data, CROPPED, batch=3, seed=seed), 14)
    before = TrainingImages(images, data, CROPPED, batch=3, seed=seed)
    for _ in range(stop):
        next(before)
    state = json.loads(json.dumps(before.state_dict()))
    before.close()
    after = TrainingImages(images, PLAIN_CROPS, CROPPED, batch=3, seed=seed)
    next(after)  # has read ahead: that is dropped
    after.load_state_dict(state)
    assert all(map(same, take(after, 14 - stop), whole[stop:]))


PLAIN_CROPS = ImageDataConfig(name="arrays", source="x", size=8, threads=2)


def test_repeated_images_fill_consecutive_slots_of_a_pass_and_differ_in_their_crop() -> None:
    # 10 images and 3 repeats: 3 batches of 3 slots hold images 0 to 2 of the permutation, 3 times.
    settings_ = {"batch": 3, "seed": 5}
    repeated = AugmentConfig(repeats=3)
    found = take(TrainingImages(Numbered(10), PLAIN, repeated, **settings_), 6)
    plain = take(TrainingImages(Numbered(10), PLAIN, AugmentConfig(), **settings_), 6)
    for first in (0, 3):  # the same permutation in each pass, read more slowly
        order = [n for batch in plain[first : first + 3] for n in numbers(batch)]
        read = [n for batch in found[first : first + 3] for n in numbers(batch)]
        assert read == [n for n in order[:3] for _ in range(3)]
    # Batches of 8 slots of the permutation p: p0 p0 p0 p1 p1 p1 p2 p2, then p2 p3 p3 p3 p4 p4 p4
    # p5, dealt to three parts in turn.
    order = numbers(take(TrainingImages(Numbered(17), PLAIN, AugmentConfig(), batch=17), 1)[0])
    dealt = take(TrainingImages(Numbered(17), PLAIN, repeated, batch=8), 2)
    for batch, places in zip(
        dealt, ((0, 1, 2, 0, 1, 2, 0, 1), (2, 3, 4, 3, 4, 5, 3, 4)), strict=True
    ):
        assert numbers(batch) == [order[place] for place in places]
    held = DeviceImages(Numbered(17), PLAIN, repeated, batch=8, device=torch.device("cpu"))
    assert [numbers(next(held)) for _ in range(2)] == [numbers(batch) for batch in dealt]
    images = random_images([0] * 6, side=13)
    cropped = AugmentConfig(crop=(0.3, 1.0), repeats=3)
    (batch,) = take(TrainingImages(images, PLAIN_CROPS, cropped, batch=6), 1)
    assert len({image.numpy().tobytes() for image in batch.images}) == 6


def test_a_state_with_other_repeats_is_refused() -> None:
    plain = TrainingImages(Numbered(9), PLAIN, AugmentConfig(), batch=4)
    twice = TrainingImages(Numbered(9), PLAIN, AugmentConfig(repeats=2), batch=4)
    with pytest.raises(UserError, match="read its images with repeats=1, this one with repeats=2"):
        twice.load_state_dict(plain.state_dict())
    with pytest.raises(UserError, match="read its images with repeats=2, this one with repeats=1"):
        plain.load_state_dict(twice.state_dict())
    for batches in (plain, twice):
        batches.close()
    with pytest.raises(UserError, match=r"augment.repeats=0; it must be at least 1"):
        AugmentConfig(repeats=0)


def test_ranks_share_out_the_batches_of_one_process() -> None:
    one = take(TrainingImages(Numbered(9), PLAIN, AugmentConfig(), batch=4), 5)
    rows = [rank_rows(4, rank=rank, world_size=2, unit="images") for rank in (0, 1)]
    pair = [
        take(TrainingImages(Numbered(9), PLAIN, AugmentConfig(), batch=4, rows=own), 5)
        for own in rows
    ]
    for whole, left, right in zip(one, *pair, strict=True):
        assert numbers(whole) == numbers(left) + numbers(right)
        assert left.seed == right.seed == whole.seed


def test_other_seeds_give_other_orders_and_crops() -> None:
    images = random_images([0] * 6, side=13)
    first, other = (
        take(TrainingImages(images, PLAIN_CROPS, CROPPED, batch=6, seed=seed), 2) for seed in (0, 1)
    )
    assert not torch.equal(first[0].images, other[0].images)
    # The same images in two passes are cropped anew.
    flat = [{image.numpy().tobytes() for image in batch.images} for batch in first]
    assert flat[0].isdisjoint(flat[1])


def test_a_saved_state_of_other_images_is_refused() -> None:
    batches = TrainingImages(Numbered(9), PLAIN, AugmentConfig(), batch=4)
    for key, value in (("images", 10), ("batch", 3), ("seed", 1)):
        with pytest.raises(UserError, match=f"read its images with {key}={value}, this one with"):
            batches.load_state_dict({**batches.state_dict(), key: value})
    batches.close()


def test_sizes_that_do_not_fit_are_refused() -> None:
    for batch, complaint in (
        (0, "batch=0 must be"),
        (10, "batch=10 exceeds the 9 training images"),
    ):
        with pytest.raises(UserError, match=complaint):
            TrainingImages(Numbered(9), PLAIN, AugmentConfig(), batch=batch)
    with pytest.raises(UserError, match="batch=3 images cannot be divided among world_size=2"):
        rank_rows(3, rank=0, world_size=2, unit="images")
    with pytest.raises(UserError, match="rank=2 must lie below"):
        rank_rows(4, rank=2, world_size=2, unit="images")
    with pytest.raises(UserError, match="limit=10 exceeds the 9 images of numbered"):
        EvaluationImages(Numbered(9), PLAIN, batch=4, limit=10)
    with pytest.raises(UserError, match="batch=0"):
        EvaluationImages(Numbered(9), PLAIN, batch=0)


@given(st.integers(1, 30), st.integers(1, 9), st.sampled_from(["shuffled", "stored"]))
@settings(max_examples=10)
def test_an_evaluation_reads_every_image_once_in_a_fixed_order(
    count: int, batch: int, order: str
) -> None:
    images = Numbered(count)
    batches = EvaluationImages(images, PLAIN, batch=batch, order=order, seed=3)
    found = [numbers(b) for b in batches]
    assert [len(b) for b in found[:-1]] == [batch] * (len(batches) - 1)
    flat = [n for b in found for n in b]
    assert sorted(flat) == list(range(count)) and images.reads == [1] * count
    assert order == "shuffled" or flat == sorted(flat)
    again = EvaluationImages(Numbered(count), PLAIN, batch=batch, order=order, seed=3)
    assert [numbers(b) for b in again] == found


def test_shuffled_batches_mix_the_classes_of_sorted_files() -> None:
    images = random_images([n // 20 for n in range(200)])
    for batch in EvaluationImages(images, PLAIN, batch=50):
        assert len(set(batch.labels.tolist())) >= 8


def test_single_batches_can_be_read_again() -> None:
    images = Numbered(10)
    batches = EvaluationImages(images, PLAIN, batch=3, limit=8)
    whole = list(batches)
    assert len(whole) == 3 and len(whole[2].labels) == 2
    images.reads = [0] * 10
    assert all(map(same, batches.read([2, 0]), [whole[2], whole[0]]))
    assert sum(images.reads) == 5  # the others were not decoded


def test_a_broken_image_stops_the_batch_with_its_name() -> None:
    class Broken(Numbered):
        def pixels(self, index: int) -> Pixels:
            if index == 4:
                raise UserError("image 4 is broken")
            return super().pixels(index)

    with pytest.raises(UserError, match="image 4 is broken"):
        list(EvaluationImages(Broken(9), PLAIN, batch=3))
    with pytest.raises(UserError, match="image 4 is broken"):
        take(TrainingImages(Broken(9), PLAIN, AugmentConfig(), batch=9), 1)
