"""The 200 classes of a shifted set are found by name, and must be the published ones."""

import numpy as np
import pytest

from acmoe.data.images.imagenet_shift import class_subset, images_of
from acmoe.errors import UserError
from vision_cases import random_images

# The classes of ImageNet-A as distances from one to the next, the first from 0.
STEPS = (
    "6 5 2 2 2 5 1 4 3 7 2 3 5 3 7 13 1 5 3 10 1 4 2 1 2 6 2 1 2 3 11 1 5 2 11 1 6 1 56 27 1 19 "
    "23 6 4 4 4 3 3 5 1 1 1 1 1 2 1 1 2 2 4 1 2 1 3 4 1 1 11 14 2 9 6 8 11 3 1 1 2 3 4 5 1 3 5 3 "
    "2 7 1 7 11 1 4 1 8 2 11 3 2 4 4 18 2 12 2 9 3 1 6 3 5 4 1 7 3 1 2 4 10 17 1 2 5 12 1 13 1 1 "
    "1 15 10 9 5 2 3 14 3 15 17 10 3 3 6 5 2 3 5 1 2 3 1 6 6 5 5 1 1 9 2 5 3 8 2 2 4 6 2 3 9 3 8 "
    "9 1 8 2 7 3 7 6 11 8 1 1 3 6 2 2 4 3 2 1 2 12 1 8 1 3 2 1 1"
)
IMAGENET_A = np.cumsum([int(step) for step in STEPS.split()])
WNIDS = [f"n{number:08d}" for number in range(1000)]  # sorted, as ImageNet's are


def test_the_published_classes_of_imagenet_a_are_recognised() -> None:
    folders = [WNIDS[number] for number in IMAGENET_A]
    assert class_subset("imagenet-a", folders, WNIDS).tolist() == IMAGENET_A.tolist()
    # In whatever order the folders are listed, which is that of the images' labels.
    found = class_subset("imagenet-a", folders[::-1], WNIDS).tolist()
    assert found == IMAGENET_A.tolist()[::-1]


def test_another_set_is_not_taken_for_it() -> None:
    folders = [WNIDS[number] for number in IMAGENET_A]
    for shift in ("imagenet-r", "imagenet-o"):
        with pytest.raises(UserError, match=f"are not those of {shift} .digest 973e8c3e530bf5db"):
            class_subset(shift, folders, WNIDS)
    changed = [*folders[:-1], WNIDS[999]]
    with pytest.raises(UserError, match="are not those of imagenet-a"):
        class_subset("imagenet-a", changed, WNIDS)
    with pytest.raises(UserError, match="imagenet-a has 199 class folders, published are 200"):
        class_subset("imagenet-a", folders[1:], WNIDS)
    with pytest.raises(UserError, match="not in the order of their WordNet ids"):
        class_subset("imagenet-a", folders, WNIDS[::-1])


def test_a_model_of_fewer_classes_may_have_any_subset() -> None:
    assert class_subset("imagenet-r", ["n3", "n1"], ["n0", "n1", "n2", "n3"]).tolist() == [3, 1]
    with pytest.raises(UserError, match=r"has folders n9 \(1 in all\) that are no class"):
        class_subset("imagenet-r", ["n1", "n9"], ["n0", "n1"])
    with pytest.raises(UserError, match="has folders for 1 classes of the model"):
        class_subset("imagenet-o", ["n1"], ["n0", "n1"])
    with pytest.raises(UserError, match="shift='imagenet-v2' is unknown; choose one of imagenet-a"):
        class_subset("imagenet-v2", ["n0", "n1"], ["n0", "n1"])


def test_images_are_chosen_by_the_names_of_their_classes() -> None:
    images = random_images([0, 1, 2, 1, 0], classes=("cat", "dog", "owl"))
    found = images_of(images, ["owl", "cat", "emu"])
    assert found.labels.tolist() == [0, 2, 0]
    assert [found.where(n) for n in range(3)] == [images.where(n) for n in (0, 2, 4)]
    with pytest.raises(UserError, match="noise has no image of the 1 classes asked for"):
        images_of(images, ["emu"])
