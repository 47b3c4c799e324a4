"""Training images on the device: the order of the others, crops of their own, repeatable."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from taken_batches import same, take

from acmoe.config.images.data import AugmentConfig, ImageDataConfig
from acmoe.data.images.batches import EvaluationImages, TrainingImages
from acmoe.data.images.on_device import DeviceImages, device_pixels, training_images
from acmoe.data.images.pixels import Pixels
from acmoe.data.sharding import rank_rows
from acmoe.errors import UserError
from vision_cases import random_images

CPU = torch.device("cpu")
DATA = ImageDataConfig(name="arrays", source="x", size=8, resize=8, on_device=True, threads=2)
CROPPED = AugmentConfig(crop=(0.3, 1.0))
LABELS = [n % 10 for n in range(11)]


def batches(augment: AugmentConfig = CROPPED, *, seed: int = 0, side: int = 8) -> DeviceImages:
    images = random_images(LABELS, side=side)
    return DeviceImages(images, DATA, augment, batch=3, device=CPU, seed=seed)


def test_uncropped_batches_are_those_read_from_the_host() -> None:
    for side in (8, 13):  # 13 pixels are brought to 8
        images = random_images(LABELS, side=side)
        host = TrainingImages(images, DATA, AugmentConfig(), batch=3, seed=5)
        device = DeviceImages(images, DATA, AugmentConfig(), batch=3, device=CPU, seed=5)
        assert all(map(same, take(device, 7), take(host, 7)))


def test_a_larger_kept_image_gives_the_centre_that_evaluation_reads() -> None:
    images = random_images(LABELS, side=13)
    data = replace(DATA, resize=13)
    device = DeviceImages(images, data, AugmentConfig(), batch=11, device=CPU)
    found, (read,) = next(device), EvaluationImages(images, data, batch=11, order="stored")
    order = device.indices(0)
    assert torch.equal(found.images, read.images[torch.from_numpy(order)])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(0, 3))
def test_a_resumed_run_reads_bit_by_bit_what_it_would_have_read(stop: int, seed: int) -> None:
    whole = take(batches(seed=seed), 14)
    before = batches(seed=seed)
    for _ in range(stop):
        next(before)
    state = json.loads(json.dumps(before.state_dict()))
    after = batches(seed=seed)
    next(after)
    after.load_state_dict(state)
    assert all(map(same, take(after, 14 - stop), whole[stop:]))


def test_other_seeds_and_other_batches_are_cropped_otherwise() -> None:
    first, other = (next(batches(seed=seed)) for seed in (0, 1))
    assert not torch.equal(first.images, other.images)
    one = DeviceImages(random_images([0] * 4), DATA, CROPPED, batch=4, device=CPU)
    passes = [{image.numpy().tobytes() for image in batch.images} for batch in take(one, 2)]
    assert passes[0].isdisjoint(passes[1])


def test_ranks_share_out_the_crops_of_one_process() -> None:
    """In two micro-batches: rank 0 has rows 0 and 2 of the four, rank 1 has rows 1 and 3."""
    one, first, second = (
        next(
            DeviceImages(
                random_images(LABELS),
                DATA,
                CROPPED,
                batch=4,
                device=CPU,
                rows=rank_rows(4, rank=rank, world_size=size, unit="images", split=2),
            )
        )
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    for own, rows in ((first, [0, 2]), (second, [1, 3])):
        assert torch.equal(own.images, one.images[rows])
        assert torch.equal(own.labels, one.labels[rows])
        assert own.seed == one.seed


def test_crops_show_parts_of_their_own_image() -> None:
    # Image n is n everywhere: whatever is cut out of it is n too.
    images = random_images(LABELS)
    for number in range(len(LABELS)):
        images.images[number] = 20 * number
    source = DeviceImages(images, DATA, CROPPED, batch=11, device=CPU)
    own = source.indices(0)
    found = next(source)
    assert torch.equal(
        found.images, torch.from_numpy(20 * own).view(-1, 1, 1, 1).byte().expand(-1, 3, 8, 8)
    )
    assert found.labels.tolist() == [LABELS[n] for n in own]


def test_the_config_decides_where_training_images_lie() -> None:
    images = random_images(LABELS)
    for on_device, kind in ((True, DeviceImages), (False, TrainingImages)):
        data = replace(DATA, on_device=on_device)
        found = training_images(images, data, CROPPED, batch=3, device=CPU)
        assert type(found) is kind
        found.close()


def test_what_crops_on_the_device_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match=r"resize=17 is over twice data.size=8: .*on_device=false"):
        replace(DATA, resize=17)
    assert replace(DATA, resize=17, on_device=False).shorter_side == 17


def test_an_image_that_cannot_be_read_is_named_before_the_first_step() -> None:
    images = random_images([0] * 200)

    def pixels(index: int) -> Pixels:
        if index == 150:
            raise UserError("image 150 is broken")
        return np.zeros((8, 8, 3), np.uint8)

    images.pixels = pixels
    with pytest.raises(UserError, match="image 150 is broken"):
        device_pixels(images, DATA, CPU)
