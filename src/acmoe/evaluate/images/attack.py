"""Accuracy under attack at each radius, and the fraction of tokens that change expert.

B images, K classes, T tokens.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.attacks.attack import perturb
from acmoe.attacks.coupling import check_independent
from acmoe.attacks.target import Target, white_box
from acmoe.config.images.attack import AttackConfig, eps_text
from acmoe.config.images.data import ImageDataConfig
from acmoe.config.serialize import encode
from acmoe.data.images.batches import EvaluationImages, ImageBatch
from acmoe.data.images.splits import ImageSet
from acmoe.data.progress import Progress, silent
from acmoe.data.seeding import derive_seed
from acmoe.errors import check
from acmoe.evaluate.finite import naming
from acmoe.evaluate.images.accuracy import check_classes, count_hits, moe_layers
from acmoe.evaluate.images.attack_journal import AttackJournal, Record, fingerprint, open_journal
from acmoe.evaluate.images.attack_progress import AttackProgress
from acmoe.evaluate.images.capacity import own_capacity, using_capacity
from acmoe.evaluate.statistics import using_statistics
from acmoe.models.recorded import recorded
from acmoe.routing.state import first_choice
from acmoe.runtime import pick_device, seeded


@dataclass(frozen=True, kw_only=True)
class AttackFigure:
    """Results of all images, attacked within one radius."""

    eps: float
    top1: float  # percent still classified as their label
    top5: float | None  # percent; None where there are no more than five classes
    moved: tuple[float, ...]  # percent of tokens, per MoE layer, whose first expert changes


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    """Results of an attack at several radii, with all settings that they depend on."""

    attack: dict[str, Any]  # its name and settings
    space: str
    clamp: bool
    labels: str
    precision: str  # precision of the attack's gradients; accuracy is always measured in fp32
    data: str
    split: str
    images: int
    size: int  # pixels a side
    batch: int
    order: str
    seed: int
    statistics: str  # mode of adaptive routers; gradients always flow through the scale
    capacity: float | None  # capacity factor of the experts; None: no token is dropped
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
    """Attack every image at every radius.

    With `folder`, the results of each batch are saved there, and the same call after a crash runs
    only the batches that are left; a KeyboardInterrupt says how many are saved. The figures do not
    depend on that: random draws for a batch follow from the seed, the radius and the number of the
    batch.
    """
    torch_device = pick_device(device)
    model = model.to(torch_device)
    batches = EvaluationImages.of(images, data, config)
    sweep = _Sweep(Target.of(model, data, config), batches, config, torch_device)
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(using_statistics(model, config.statistics))
        stack.enter_context(using_capacity(model, config.capacity))
        stack.enter_context(white_box(model))
        check_independent(model, config.attack)
        journal = AttackJournal()
        if folder is not None:
            settings = _settings(model, batches, config, mode)
            journal = stack.enter_context(open_journal(Path(folder), settings))
            sweep.check_images(journal)
            stack.enter_context(sweep.telling_what_is_saved(journal))
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
        """Attack the batches that are not yet in the journal for this radius."""
        stage, total = f"{self.config.attack.name}, eps {eps_text(eps)}", len(self.batches)
        left = [number for number in range(total) if (eps, number) not in journal.done]
        done = total - len(left)
        advance = AttackProgress(progress, self.config.attack, eps, batches=total, done=done)
        for number, batch in zip(left, self.batches.read(left), strict=True):
            of = f"{stage}, batch {number + 1} of {total} of {self.batches.images.title}"
            with naming(f"{of}, {self.config.split}"):
                found = self.attack(batch, eps, number, advance)
            journal.add({"eps": eps, "batch": number, **found})

    @contextlib.contextmanager
    def telling_what_is_saved(self, journal: AttackJournal) -> Iterator[None]:
        """Give a KeyboardInterrupt the number of batches that the journal has, and its path."""
        try:
            yield
        except KeyboardInterrupt:
            wanted = [
                (eps, number) for eps in self.config.eps for number in range(len(self.batches))
            ]
            saved = len(journal.saved() & set(wanted))
            raise KeyboardInterrupt(
                f"{saved} of {len(wanted)} batches are saved in {journal.path}; give the same "
                "command again to continue"
            ) from None

    def check_images(self, journal: AttackJournal) -> None:
        """Raise where the images of the journal's first batch are no longer those it attacked.

        To read all images of a finished attack again would take too long.
        """
        (_, number), record = next(iter(journal.done.items()), ((0.0, 0), {}))
        if "pixels" in record:  # absent in an empty journal and in version 0.1
            (batch,) = self.batches.read([number])
            check(
                record["pixels"] == _pixels_sha256(batch),
                f"{self.batches.images.title} has other images than those attacked so far; restore "
                f"them, or delete {journal.path} to attack anew",
            )

    def attack(
        self, batch: ImageBatch, eps: float, number: int, advance: Callable[[int], None]
    ) -> Record:
        """Attack one batch and return counts: correct predictions, and tokens that moved."""
        config, target = self.config, self.target
        seed = batch_seed(config, eps, number)
        labels_B = batch.labels.to(self.device)
        with seeded(seed, self.device):  # for routers with random choices
            x = target.enter(batch.images.to(self.device))
            clean_BK, clean_experts = _predict(target, x)
            check_classes(clean_BK, len(self.batches.images.classes))
            avoided_B = labels_to_avoid(config, labels_B, clean_BK)
            x = perturb(target, x, avoided_B, eps, config.attack, seed=seed, advance=advance)
            attacked_BK, attacked_experts = _predict(target, x)
        pairs = list(zip(clean_experts, attacked_experts, strict=True))
        return {
            "images": len(x),
            "pixels": _pixels_sha256(batch),
            "clean": list(count_hits(clean_BK, labels_B)),
            "attacked": list(count_hits(attacked_BK, labels_B)),
            "moved": [int((before != after).sum()) for before, after in pairs],
            "tokens": [len(before) for before, _ in pairs],
        }


def _pixels_sha256(batch: ImageBatch) -> str:
    return hashlib.sha256(batch.images.contiguous().numpy().tobytes()).hexdigest()


def batch_seed(config: AttackConfig, eps: float, number: int) -> int:
    """Seed of all random draws for the attack on batch `number` at one radius."""
    return derive_seed(config.seed, config.attack.name, repr(eps), number)


def labels_to_avoid(config: AttackConfig, labels_B: Tensor, clean_BK: Tensor) -> Tensor:
    """Return (B,) the classes that an attack moves away from: labels, or clean predictions."""
    return labels_B if config.labels == "true" else clean_BK.argmax(-1)


@torch.no_grad()
def _predict(target: Target, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return (B, K) logits, and the first expert (T,) of each token for each MoE layer."""
    with recorded(moe_layers(target.model)) as routings:
        logits_BK = target(x)
    return logits_BK, [first_choice(routing) for routing in routings]


def _settings(
    model: nn.Module, batches: EvaluationImages, config: AttackConfig, mode: str
) -> Record:
    """Return all settings that the record of a batch depends on, except the radius."""
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
    records = {
        eps: [journal.done[eps, number] for number in range(len(batches))] for eps in config.eps
    }
    has_top5 = len(batches.images.classes) > 5
    clean_top1, clean_top5 = _accuracy(records[config.eps[-1]], "clean", has_top5)
    return AttackReport(
        attack=encode(config.attack),
        space=config.space,
        clamp=config.clamp,
        labels=config.labels,
        precision=config.precision,
        data=batches.images.title,
        split=config.split,
        images=len(batches.indices),
        size=batches.data.size,
        batch=config.batch,
        order=config.order,
        seed=config.seed,
        statistics=mode,
        capacity=own_capacity(sweep.target.model),
        clean_top1=clean_top1,
        clean_top5=clean_top5,
        figures=tuple(_figure(eps, found, has_top5) for eps, found in records.items()),
    )


def _figure(eps: float, records: Sequence[Record], has_top5: bool) -> AttackFigure:
    """Sum the records of all batches at one radius."""
    top1, top5 = _accuracy(records, "attacked", has_top5)
    moved = [sum(counts) for counts in zip(*(record["moved"] for record in records), strict=True)]
    tokens = [sum(counts) for counts in zip(*(record["tokens"] for record in records), strict=True)]
    return AttackFigure(
        eps=eps,
        top1=top1,
        top5=top5,
        moved=tuple(100 * m / t for m, t in zip(moved, tokens, strict=True)),
    )


def _accuracy(records: Sequence[Record], key: str, has_top5: bool) -> tuple[float, float | None]:
    """Return top-1 and top-5 accuracy in percent over all batches."""
    images = sum(record["images"] for record in records)
    top1, top5 = (100 * sum(record[key][rank] for record in records) / images for rank in (0, 1))
    return top1, top5 if has_top5 else None
