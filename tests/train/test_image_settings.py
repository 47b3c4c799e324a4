"""Settings of an image run: what they mean, and which are refused before a folder is written."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from acmoe.config.images.train import SwinRunConfig, override_vision_run
from acmoe.config.serialize import from_document, to_document
from acmoe.errors import UserError
from acmoe.evaluate.run import open_run
from acmoe.recipes import recipe
from acmoe.train.run import train, train_images
from tiny_runs import byte_corpus, tiny_run
from tiny_vision_runs import QUIET, tiny_vision_run, trained_images


def test_a_length_in_another_unit_asks_for_the_warmup_in_it() -> None:
    run = recipe("swin-small")
    assert isinstance(run, SwinRunConfig)
    changed = override_vision_run(run, ["steps=100", "warmup=10"])
    assert (changed.steps, changed.epochs, changed.warmup) == (100, None, 10)
    with pytest.raises(UserError, match=r"warmup=5 in epochs; with steps, give warmup in steps"):
        override_vision_run(run, ["steps=100"])
    with pytest.raises(UserError, match=r"steps=None and epochs=None; give one"):
        override_vision_run(run, ["epochs=none"])


def test_names_of_routers_mean_what_they_mean_in_image_models() -> None:
    run = tiny_vision_run("model.router=adaptive", router="smoe")
    assert run == tiny_vision_run()
    assert tiny_vision_run("model.router=smoe") == tiny_vision_run(router="smoe")


@pytest.mark.parametrize("soft", [False, True], ids=["swin", "softmoe"])
def test_a_config_comes_back_from_its_document(soft: bool) -> None:
    run = tiny_vision_run(soft=soft)
    document = json.loads(json.dumps(to_document(run)))
    assert from_document(document, type(run), "here") == run


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("data.size=16", r"data.size=16 differs from model.image_size=8"),
        ("split=3", r"batch=16 images do not split into 3"),
        ("min_lr=1", r"min_lr=1.0 exceeds lr=0.003"),
        ("model.channels=1", r"model.channels=1; images are read in 3 colours"),
        ("steps=0", r"steps=0; it must be a whole number of at least 1"),
        ("model.router=soft", r"router='soft' fills slots"),
        ("eps=0", r"eps=0.0; it must be positive"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(pair: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        tiny_vision_run(pair)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("model.num_classes=7", r"digits has 10 classes, not model.num_classes=7; set it to 10"),
        ("eval_images=1000", r"eval_images=1000 exceeds the 26\d validation images"),
        ("batch=4096", r"batch=4096 exceeds the 1,2\d\d training images"),
        ("model.placement=everywhere", r"placement='everywhere' is unknown"),
    ],
)
def test_a_mistake_is_found_before_the_folder_is_begun(
    pair: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train_images(tiny_vision_run(pair), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


def test_a_broken_validation_image_is_named_before_the_first_step(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in range(10):
            (tmp_path / split / str(label)).mkdir(parents=True)
            for number in range(2):
                image = Image.fromarray(np.full((8, 8, 3), 20 * label + number, np.uint8))
                image.save(tmp_path / split / str(label) / f"{number}.png")
    cut = tmp_path / "val" / "7" / "1.png"
    cut.write_bytes(cut.read_bytes()[:50])  # a whole header, and no end
    place = ("data.name=folder", f"data.source={tmp_path}", "data.resize=8", "eval_images=none")
    with pytest.raises(UserError, match=r"val/7/1\.png is no readable image"):
        train_images(tiny_vision_run(*place), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


def test_language_and_vision_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    trained_images(tiny_vision_run("steps=1"), tmp_path / "run")
    with pytest.raises(UserError, match=r"holds a swin-run, not a softmoe-run; choose another"):
        train_images(tiny_vision_run(soft=True), tmp_path / "run", console=QUIET)
    with pytest.raises(UserError, match=r"holds a swin-run, not a language-run; choose another"):
        train(tiny_run(byte_corpus(tmp_path)), tmp_path / "run", console=QUIET)
    with pytest.raises(UserError, match=r"is a run of an image model \(swin-run\)"):
        open_run(tmp_path / "run")


def test_other_images_in_the_same_place_are_refused(tmp_path: Path) -> None:
    def write(last: int) -> None:
        rng = np.random.default_rng(0)
        for split in ("train", "val"):
            labels = np.array([*(n % 10 for n in range(39)), last])
            pixels = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
            np.savez(tmp_path / f"{split}.npz", images=pixels, labels=labels)

    write(last=3)
    place = ("data.name=arrays", f"data.source={tmp_path}", "data.resize=8", "steps=2")
    config = tiny_vision_run(*place, "eval_images=none")
    trained_images(config, tmp_path / "run")
    write(last=4)
    with pytest.raises(UserError, match="not the images this run was begun with"):
        train_images(config, tmp_path / "run", console=QUIET)
