"""Load a run and route a sample of its data: the records that an analysis is computed from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from acmoe.analyze.record import RoutingRecord, record_images, record_language
from acmoe.config.images.attack import AttackConfig, eps_text
from acmoe.config.images.data import Capacity, checked_capacity
from acmoe.config.images.train import VISION_RUNS
from acmoe.config.routing import AdaptiveConfig, Statistics
from acmoe.config.text.data import ContaminationConfig
from acmoe.data.progress import Progress, silent
from acmoe.data.text.contaminate import contaminate
from acmoe.errors import check
from acmoe.evaluate.images.attack_progress import AttackProgress
from acmoe.evaluate.images.attacked import attacked_images
from acmoe.evaluate.language import check_vocabulary
from acmoe.evaluate.run import ImageRun, Run, open_image_run, open_run, run_kind
from acmoe.evaluate.statistics import using_statistics
from acmoe.runtime import pick_device

# The paper's statistics, and those that a causal model uses instead.
COMPARED: tuple[Statistics, ...] = ("batch", "running")


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """Options of an analysis. The analysis repeats every option that its numbers depend on."""

    split: Literal["valid", "test"] = "test"  # split of the data
    which: Literal["best", "last"] = "best"  # checkpoint of the run
    tokens: int | None = None  # text: number of tokens from the start of the split; None: 4096
    images: int | None = None  # images: number of images, all patches of each; None: 64
    statistics: Statistics | None = None  # mode of the adaptive routers; None: the model's own
    capacity: Capacity = None  # images: capacity factor of the experts; None: no token is dropped
    batch: int | None = None  # rows of text (None: 8) or images (None: 64) per forward pass
    contamination: ContaminationConfig | None = None  # text: also route a corrupted copy
    attack: AttackConfig | None = None  # images: also route attacked images
    seed: int = 0  # seed of the images' order and of random routers
    device: str = "auto"  # auto: the first of cuda, xpu, mps and cpu that torch finds

    def __post_init__(self) -> None:
        for name in ("tokens", "images", "batch"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name}={value}; it must be at least 1")
        checked_capacity(self.capacity)


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """The sample after contamination (text) or an attack (images)."""

    record: RoutingRecord
    how: str  # description for the reader
    touched: Tensor | None  # text: (N,) bool, tokens that were replaced; None for attacks


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model of transformers, in place of a run of this library."""

    name: str  # the name of its folder, or of its class
    router: str  # "adaptive", or the class of its routers
    title: str  # the title of the text
    pieces: tuple[str, ...]  # the text of each sampled token; empty if it is not known
    settings: dict[str, Any]  # fields of its config


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One sample of a run, routed with several statistics modes and inputs."""

    run: Run | ImageRun | HuggingFaceModel
    step: int | None  # optimizer step of the checkpoint; None for a model of transformers
    own: RoutingRecord  # routed with the requested statistics
    compared: dict[str, RoutingRecord]  # by each mode of COMPARED; empty without statistics
    disturbed: Disturbed | None


def sample_run(
    folder: Path | str, config: AnalyzeConfig | None = None, *, progress: Progress = silent
) -> Sampled:
    """Load the run's checkpoint and route a sample of the run's own data.

    `progress` is told how far an attack on the images is.
    """
    config = config or AnalyzeConfig()
    if run_kind(folder) in VISION_RUNS:
        return _sample_images(open_image_run(folder), config, progress)
    return _sample_text(open_run(folder), config)


def _sample_text(run: Run, config: AnalyzeConfig) -> Sampled:
    attack = None if config.attack is None else config.attack.attack.name
    unused = {"images": config.images, "attack": attack, "capacity": config.capacity}
    _check_unused(run.folder, "a language model", **unused)
    model = run.model(config.which, device=pick_device(config.device))
    corpus = run.corpus()
    check_vocabulary(model.config.vocab_size, corpus)
    clean = corpus[config.split]
    record = partial(
        record_language,
        model,
        tokens=config.tokens or 4096,
        batch=config.batch or 8,
        precision=run.config.precision,
        seed=config.seed,
        title=f"{corpus.title}, {config.split}",
    )
    own, compared = record_modes(model, config.statistics, partial(record, clean))
    disturbed = None
    if config.contamination is not None:
        inputs, targets, report = contaminate(corpus, config.split, config.contamination)
        with using_statistics(model, config.statistics):
            found = record(inputs, targets)
        count = len(own.layers[0].cluster)
        disturbed = Disturbed(
            record=found,
            how=f"{report.replaced / report.words:.1%} of {corpus.kind} replaced",
            touched=torch.from_numpy(np.asarray(inputs[:count] != clean[:count])),
        )
    return Sampled(
        run=run,
        step=run.step(config.which),
        own=own,
        compared=compared,
        disturbed=disturbed,
    )


def _sample_images(run: ImageRun, config: AnalyzeConfig, progress: Progress) -> Sampled:
    rate = None if config.contamination is None else config.contamination.rate or "default"
    _check_unused(run.folder, "an image model", tokens=config.tokens, contaminate=rate)
    device = pick_device(config.device)
    model = run.model(config.which, device=device)
    images, batch = run.images()[config.split], config.batch or 64
    count = min(config.images or 64, len(images))
    record = partial(
        record_images,
        model,
        images,
        run.config.data,
        count=count,
        batch=batch,
        precision=run.config.precision,
        seed=config.seed,
        capacity=config.capacity,
    )
    own, compared = record_modes(model, config.statistics, record)
    disturbed = None
    if config.attack is not None:
        attack = replace(config.attack, capacity=config.capacity)  # attack the model as analyzed
        batches = math.ceil(count / batch)
        with using_statistics(model, config.statistics):
            advance = AttackProgress(progress, attack.attack, attack.eps[0], batches=batches)
            reading = attacked_images(model, run.config.data, attack, device, advance)
            found = record(reading=reading)
        disturbed = Disturbed(record=found, how=_attack_text(attack), touched=None)
    return Sampled(
        run=run,
        step=run.step(config.which),
        own=own,
        compared=compared,
        disturbed=disturbed,
    )


def _attack_text(config: AttackConfig) -> str:
    """Describe an attack: its name, its radius, and the settings that are not the default ones."""
    attack = config.attack
    changed = [
        f", {getattr(attack, field.name)} {field.name}"
        for field in fields(attack)
        if getattr(attack, field.name) != field.default
    ]
    return f"{attack.name}, eps {eps_text(config.eps[0])}{''.join(changed)}"


def record_modes(
    model: nn.Module, requested: Statistics | None, record: Callable[[], RoutingRecord]
) -> tuple[RoutingRecord, dict[str, RoutingRecord]]:
    """Record the sample with the requested statistics, and with each mode of COMPARED."""
    with using_statistics(model, requested):
        own = record()
    compared: dict[str, RoutingRecord] = {}
    for mode in COMPARED if _supports(model, COMPARED) else ():
        if mode == own.statistics:
            compared[mode] = own
            continue
        with using_statistics(model, mode):
            compared[mode] = record()
    return own, compared


def _supports(model: nn.Module, modes: Sequence[Statistics]) -> bool:
    """Return whether the model has adaptive routers and all of them can use these statistics.

    A router that measures the tokens of its own layer has no statistics of the previous layer.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    adaptive = [config for config in configs if isinstance(config, AdaptiveConfig)]
    return bool(adaptive) and all(
        replace(config, eval_statistics=mode).reads == config.reads
        for config in adaptive
        for mode in modes
    )


def _check_unused(folder: Path, kind: str, **options: object) -> None:
    """Raise if an option is set that does not apply to this kind of run."""
    for name, value in options.items():
        check(
            value is None,
            f"{name}={value} does not apply to {folder}, a run of {kind}; leave it out",
        )
