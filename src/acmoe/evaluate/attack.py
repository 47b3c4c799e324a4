"""Accuracy under attack, radius by radius, and how far the attack moved tokens between experts.

B images, K classes, T tokens.
"""

import contextlib
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.attacks.attack import perturb
from acmoe.attacks.target import Target, white_box
from acmoe.config.images.attack import AttackConfig, eps_text
from acmoe.config.images.data import ImageDataConfig
from acmoe.config.serialize import encode
from acmoe.data.images.batches import EvaluationImages, ImageBatch
from acmoe.data.images.splits import ImageSet
from acmoe.data.progress import Progress, silent
from acmoe.data.seeding import derive_seed
from acmoe.evaluate.attack_journal import AttackJournal, Record, fingerprint, open_journal
from acmoe.evaluate.capacity import own_capacity, using_capacity
from acmoe.evaluate.statistics import using_statistics
from acmoe.evaluate.vision import check_classes, count_hits, moe_layers
from acmoe.models.recorded import recorded
from acmoe.runtime import pick_device, seeded


@dataclass(frozen=True, kw_only=True)
class AttackFigure:
    """All images, attacked within one radius."""

    eps: float
    top1: float  # percent still classified as their label
    top5: float | None  # percent; None where there are no more than five classes
    moved: tuple[float, ...]  # percent of each MoE layer's tokens with another first expert


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    """A sweep, with everything its figures depend on."""

    attack: dict[str, Any]  # its name and settings
    space: str
    clamp: bool
    labels: str
    precision: str  # of the gradients the attack followed; figures are of fp32
    data: str
    split: str
    images: int
    size: int  # pixels a side
    batch: int
    order: str
    seed: int
    statistics: str  # mode of the adaptive routers; the gradient always flows through the scale
    capacity: float | None  # factor of the experts' capacity; None: no token is dropped
    clean_top1: float
    clean_top5: float | None
    figures: tuple[AttackFigure, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_attack(
    model: nn.Module,
    images: ImageSet,
    data: ImageDataConfig,
    config: AttackConfig,
    *,
    folder: Path | str | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> AttackReport:
    """Attack every image within every radius.

    With `folder`, each batch is written down there, and the same call after a crash or a kill does
    only what is left. Figures do not depend on it: what is drawn for a batch follows from the seed,
    the radius and the batch's number.
    """
    place = pick_device(device)
    model = model.to(place)
    batches = EvaluationImages(
        images,
        data,
        batch=config.batch,
        order=config.order,
        seed=config.seed,
        limit=config.limit,
    )
    sweep = _Sweep(Target.of(model, data, config), batches, config, place)
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(using_statistics(model, config.statistics))
        stack.enter_context(using_capacity(model, dropless=config.dropless))
        stack.enter_context(white_box(model))
        journal = AttackJournal()
        if folder is not None:
            settings = _settings(model, batches, config, mode)
            journal = stack.enter_context(open_journal(Path(folder), settings))
        for eps in config.eps:
            sweep.run(eps, journal, progress)
        return _report(sweep, mode, journal)


@dataclass(frozen=True)
class _Sweep:
    target: Target
    batches: EvaluationImages
    config: AttackConfig
    device: torch.device

    def run(self, eps: float, journal: AttackJournal, progress: Progress) -> None:
        """Attack the batches that the journal does not have for this radius."""
        stage, total = f"{self.config.attack.name}, eps {eps_text(eps)}", len(self.batches)
        left = [number for number in range(total) if (eps, number) not in journal.done]
        done = total - len(left)
        progress(stage, done, total)
        for number, batch in zip(left, self.batches.read(left), strict=True):
            journal.add({"eps": eps, "batch": number, **self.attack(batch, eps, number)})
            done += 1
            progress(stage, done, total)

    def attack(self, batch: ImageBatch, eps: float, number: int) -> Record:
        """How one batch fares, as counts."""
        config, target = self.config, self.target
        seed = derive_seed(config.seed, config.attack.name, repr(eps), number)
        labels_B = batch.labels.to(self.device)
        with seeded(seed, self.device):  # for routers that draw at random
            x = target.enter(batch.images.to(self.device))
            clean_BK, clean_experts = _answer(target, x)
            check_classes(clean_BK, len(self.batches.images.classes))
            aim_B = labels_B if config.labels == "true" else clean_BK.argmax(-1)
            x = perturb(target, x, aim_B, eps, config.attack, seed=seed)
            attacked_BK, attacked_experts = _answer(target, x)
        pairs = list(zip(clean_experts, attacked_experts, strict=True))
        return {
            "images": len(x),
            "clean": list(count_hits(clean_BK, labels_B)),
            "attacked": list(count_hits(attacked_BK, labels_B)),
            "moved": [int((before != after).sum()) for before, after in pairs],
            "tokens": [len(before) for before, _ in pairs],
        }


@torch.no_grad()
def _answer(target: Target, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(B, K) logits, and (T,) first experts of each MoE layer."""
    with recorded(moe_layers(target.model)) as routings:
        logits_BK = target(x)
    return logits_BK, [routing.affinity.argmax(-1) for routing in routings]


def _settings(
    model: nn.Module, batches: EvaluationImages, config: AttackConfig, mode: str
) -> Record:
    """Everything a batch's record depends on; radii may be added later."""
    data, images = batches.data, batches.images
    return {
        **{key: value for key, value in encode(config).items() if key != "eps"},
        "statistics": mode,
        "model": [repr(getattr(model, "config", None)), fingerprint(model)],
        "capacity": own_capacity(model),
        "images": [images.title, len(images), hashlib.sha256(images.labels.tobytes()).hexdigest()],
        "pixels": [data.size, data.shorter_side, *data.normalization],
    }


def _report(sweep: _Sweep, mode: str, journal: AttackJournal) -> AttackReport:
    batches, config = sweep.batches, sweep.config
    count, many = len(batches.indices), len(batches.images.classes) > 5

    def percent(records: list[Record], key: str, place: int) -> float:
        hits: int = sum(record[key][place] for record in records)
        return 100 * hits / count

    figures = []
    for eps in config.eps:
        records = [journal.done[eps, number] for number in range(len(batches))]
        layers = range(len(records[0]["tokens"]))
        tokens = [sum(record["tokens"][layer] for record in records) for layer in layers]
        moved = [sum(record["moved"][layer] for record in records) for layer in layers]
        figures.append(
            AttackFigure(
                eps=eps,
                top1=percent(records, "attacked", 0),
                top5=percent(records, "attacked", 1) if many else None,
                moved=tuple(100 * m / t for m, t in zip(moved, tokens, strict=True)),
            )
        )
    return AttackReport(
        attack=encode(config.attack),
        space=config.space,
        clamp=config.clamp,
        labels=config.labels,
        precision=config.precision,
        data=batches.images.title,
        split=config.split,
        images=count,
        size=batches.data.size,
        batch=config.batch,
        order=config.order,
        seed=config.seed,
        statistics=mode,
        capacity=own_capacity(sweep.target.model),
        clean_top1=percent(records, "clean", 0),
        clean_top5=percent(records, "clean", 1) if many else None,
        figures=tuple(figures),
    )
