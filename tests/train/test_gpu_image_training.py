"""Training image classifiers on a GPU: nothing waits inside a step, and replays are the updates."""

from pathlib import Path

import pytest
import torch
from interrupted_updates import killed_after

from acmoe.data.images.load import load_images
from acmoe.train.images import ImageTrainer
from acmoe.train.run import train_images
from tiny_vision_runs import QUIET, all_numbers, tiny_vision_run, vision_records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

CUDA = torch.device("cuda")
ON_DEVICE = ("device=cuda", "data.on_device=true", "augment.crop=0.5,1.0")
# A captured update need not draw the numbers that an eager one draws.
STILL = ("model.drop_path=0", "model.expert_dropout=0")
KINDS = pytest.mark.parametrize(
    "kind",
    [
        {"router": "smoe"},
        {"router": "adaptive"},
        {"router": "smoe", "soft": True},
        {"router": "adaptive", "soft": True},
    ],
    ids=["swin", "swin-adaptive", "softmoe", "softmoe-adaptive"],
)


def still(kind: dict[str, object]) -> tuple[str, ...]:
    """No noise of the gate either, where there is one."""
    if kind.get("soft"):
        return STILL
    gate = "model.router.noise" if kind["router"] == "smoe" else "model.router.base.noise"
    return (*STILL, f"{gate}=0")


@KINDS
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("place", [ON_DEVICE, ("device=cuda",)], ids=["on-device", "host"])
def test_a_step_never_waits_for_the_device(
    kind: dict[str, object], graph: bool, place: tuple[str, ...]
) -> None:
    config = tiny_vision_run(*place, f"graph={str(graph).lower()}", "precision=bf16", **kind)
    trainer = ImageTrainer(config, load_images(config.data), CUDA)
    for step in range(1, 6):  # lets libraries and allocators settle, and captures
        trainer.update(step, record=False)
    assert trainer.graph is None or trainer.graph.captured
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(6, 10):
            trainer.update(step, record=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.close()


@pytest.mark.parametrize("preset", [("augment.randaugment=9",), ("augment.color_jitter=0.4",)])
def test_no_alteration_of_images_waits_for_the_device(preset: tuple[str, ...]) -> None:
    config = tiny_vision_run(*ON_DEVICE, *preset)
    trainer = ImageTrainer(config, load_images(config.data), CUDA)
    for seed in range(20):  # every operation has been drawn, and its kernels loaded
        batch = next(trainer.batches)
        trainer.augment(batch.images, batch.labels, seed=seed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(20):
            trainer.augment(batch.images, batch.labels, seed=seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batches_on_the_device_are_those_of_the_cpu() -> None:
    images, targets = [], []
    for device in ("cpu", "cuda"):
        config = tiny_vision_run(*ON_DEVICE[1:], f"device={device}", "augment.erase=0")
        trainer = ImageTrainer(config, load_images(config.data), torch.device(device))
        batch = next(trainer.batches)
        x, targets_BK = trainer.augment(batch.images, batch.labels, seed=batch.seed)
        images.append(x.cpu())
        targets.append(targets_BK.cpu())
    # A pixel half way between two levels may be rounded to either; digits' deviation is 0.376.
    assert float((images[0] - images[1]).abs().max()) < 1.1 / 255 / 0.376
    torch.testing.assert_close(*targets)


@KINDS
def test_replayed_updates_are_the_updates(kind: dict[str, object], tmp_path: Path) -> None:
    for name in ("false", "true"):
        config = tiny_vision_run(
            *ON_DEVICE, f"graph={name}", "steps=40", "log_every=2", *still(kind), **kind
        )
        train_images(config, tmp_path / name, console=QUIET)
    losses = [
        [line["loss"] for line in vision_records(tmp_path / name) if line["kind"] == "train"]
        for name in ("false", "true")
    ]
    # The learning rate is float64 on one side and float32 on the other.
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][-1] < losses[1][0]


def test_replays_move_the_average_of_the_weights_as_a_float64_loop_does() -> None:
    config = tiny_vision_run(*ON_DEVICE, "graph=true", "ema=0.8")
    trainer = ImageTrainer(config, load_images(config.data), CUDA)
    assert trainer.average is not None and trainer.graph is not None
    wanted = [average.double() for average in trainer.average.average]
    for step in range(1, 9):
        trainer.update(step, record=False)
        weights = trainer.average.weights
        pairs = zip(wanted, weights, strict=True)
        wanted = [0.8 * before + 0.2 * weight.detach().double() for before, weight in pairs]
        if step == 6:
            trainer.validate()  # exchanges the weights, and puts them back for the next replay
    assert trainer.graph.captured
    for average, expected in zip(trainer.average.average, wanted, strict=True):
        torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)
    trainer.close()


@KINDS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_replayed_run_continues_to_the_same_numbers(
    kind: dict[str, object], precision: str, tmp_path: Path
) -> None:
    config = tiny_vision_run(
        *ON_DEVICE,
        *("graph=true", "steps=30", "checkpoint_every=14", f"precision={precision}"),
        *("ema=0.9", "augment.repeats=3"),
        **kind,
    )
    whole = train_images(config, tmp_path / "whole", console=QUIET)
    # A stop signal, of a time limit say, would end this run early and not the process.
    assert whole.signal is None and whole.step == whole.steps
    with killed_after(ImageTrainer, 20):
        train_images(config, tmp_path / "part", console=QUIET)
    train_images(config, tmp_path / "part", console=QUIET)
    assert vision_records(tmp_path / "part") == vision_records(tmp_path / "whole")
    assert all_numbers(tmp_path / "part") == all_numbers(tmp_path / "whole")
