"""Runs of image classifiers small enough that a test can afford dozens of steps."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import load_file

from acmoe.config.images.data import AugmentConfig, ImageDataConfig
from acmoe.config.images.presets import vision_router
from acmoe.config.images.train import (
    SoftViTRunConfig,
    SwinRunConfig,
    VisionRunConfig,
    override_vision_run,
)
from acmoe.config.images.vision import SoftViTConfig, SwinConfig
from acmoe.evaluate.run import RunFolder
from acmoe.train.run import train_images
from cpu import settle_cpu

QUIET = Console(quiet=True)

SWIN = SwinConfig(
    image_size=8,
    num_classes=10,
    patch=2,
    dim=8,
    depths=(4, 2),
    heads=(2, 4),
    window=2,
    mlp_ratio=2,
    moe_stages=(0, 1),
    adaptive_stage=0,
    num_experts=4,
    init_std=0.1,
)
SOFT = SoftViTConfig(
    image_size=8,
    num_classes=10,
    patch=2,
    dim=16,
    depth=3,
    heads=2,
    mlp_ratio=2,
    moe_blocks=2,
    num_experts=4,
    init_std=0.1,
)
# Everything that draws at random, so that a stream which is not restored shows.
LIVELY = AugmentConfig(shift=1, flip=0.5, erase=0.5, mixup=0.8, cutmix=1.0)


def tiny_vision_run(
    *overrides: str, router: str = "adaptive", soft: bool = False
) -> VisionRunConfig:
    """12 steps of 16 digits as they were scanned."""
    common: dict[str, Any] = {
        "data": ImageDataConfig(size=8, threads=1),
        "augment": LIVELY,
        "steps": 12,
        "batch": 16,
        "split": 2,
        "lr": 3e-3,
        "warmup": 3,
        "clip": 1.0,
        "log_every": 4,
        "eval_every": 6,
        "eval_images": 40,
        "checkpoint_every": 4,
        "device": "cpu",
    }
    run: VisionRunConfig
    if soft:
        run = SoftViTRunConfig(model=replace(SOFT, router=vision_router(router, SOFT)), **common)
    else:
        run = SwinRunConfig(model=replace(SWIN, router=vision_router(router, SWIN)), **common)
    return override_vision_run(run, overrides)


def trained_images(config: VisionRunConfig, folder: Path) -> Path:
    train_images(config, folder, console=QUIET)
    return folder


def vision_records(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock; fails on a torn line."""
    clock = ("seconds", "images_per_second", "crc32")
    return [
        {key: value for key, value in json.loads(line).items() if key not in clock}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def all_numbers(folder: Path) -> dict[str, Any]:
    """Every number the last checkpoint of a run holds, but the clock."""
    last = RunFolder(folder=folder).checkpoint("last")
    (weights,) = last.glob("weights-*.safetensors")
    named = {**load_file(last / "training.safetensors"), **load_file(weights)}
    for averaged in last.glob("ema/weights-*.safetensors"):
        named |= {f"ema/{name}": value for name, value in load_file(averaged).items()}
    state = json.loads((last / "state.json").read_text())
    del state["seconds"], state["seal"]
    return {**{name: value.numpy().tobytes() for name, value in named.items()}, **state}


def train_images_in_child(config: VisionRunConfig, folder: Path) -> None:
    """Train as a process of its own; its exit code is the command line's."""
    settle_cpu()
    summary = train_images(config, folder, console=QUIET)
    os._exit(0 if summary.signal is None else 128 + summary.signal)
