"""Accuracy and routing measures of an image classifier.

B images, K classes, T tokens, E experts.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from acmoe.attacks.target import unchecked_logits
from acmoe.config.images.data import ImageDataConfig, ImageEvaluateConfig
from acmoe.data.images.augment import normalize
from acmoe.data.images.batches import EvaluationImages
from acmoe.data.images.splits import ImageSet
from acmoe.data.progress import Progress, silent
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.errors import check
from acmoe.evaluate.finite import FiniteLogits
from acmoe.evaluate.host_sum import HostSum
from acmoe.evaluate.images.capacity import using_capacity
from acmoe.evaluate.routing import LayerReport, StageTally
from acmoe.evaluate.statistics import check_statistics, using_statistics
from acmoe.experts.moe import MoE
from acmoe.experts.soft import SoftMoE
from acmoe.models.recorded import recorded
from acmoe.runtime import autocast, evaluating, pick_device, seeded


@dataclass(frozen=True, kw_only=True)
class ImageFigure:
    """One pass over the images."""

    statistics: str  # mode of adaptive routers; "none" if the model has none
    top1: float  # percent
    top5: float | None  # percent; None where there are no more than five classes
    loss: float  # mean nats per image
    layers: tuple[LayerReport, ...]  # one per MoE layer, if requested


@dataclass(frozen=True, kw_only=True)
class ImageReport:
    """Results of an image classifier, with all settings that they depend on."""

    data: str
    split: str
    images: int
    classes: int
    size: int  # pixels a side
    resize: int  # shorter side before the centre crop
    batch: int
    order: str
    seed: int
    precision: str
    capacity: float | None  # capacity factor of the experts; None: no token is dropped
    figures: tuple[ImageFigure, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_images(
    model: nn.Module,
    images: ImageSet,
    data: ImageDataConfig,
    config: ImageEvaluateConfig | None = None,
    *,
    device: str = "auto",
    progress: Progress = silent,
    ranks: Ranks = ALONE,
) -> ImageReport:
    """Score a classifier on every image once, in each requested statistics mode.

    With several `ranks` each process scores its share of the batches, and all return the same
    report.
    """
    config = config or ImageEvaluateConfig()
    torch_device = pick_device(device)
    model = model.to(torch_device)
    check_statistics(model, config.statistics)
    batches = EvaluationImages.of(images, data, config)
    figures = []
    with using_capacity(model, config.capacity) as capacity, evaluating(model):
        for requested in config.statistics or (None,):
            with using_statistics(model, requested) as mode:
                figures.append(_score(model, batches, config, torch_device, mode, progress, ranks))
    return ImageReport(
        data=images.title,
        split=config.split,
        images=len(batches.indices),
        classes=len(images.classes),
        size=data.size,
        resize=data.shorter_side,
        batch=config.batch,
        order=config.order,
        seed=config.seed,
        precision=config.precision,
        capacity=capacity,
        figures=tuple(figures),
    )


@torch.no_grad()
def _score(
    model: nn.Module,
    batches: EvaluationImages,
    config: ImageEvaluateConfig,
    device: torch.device,
    mode: str,
    progress: Progress,
    ranks: Ranks,
) -> ImageFigure:
    mean, std = batches.data.normalization
    classes = len(batches.images.classes)
    hits_2, nats = torch.zeros(2, dtype=torch.int64, device=device), HostSum()
    tally, finite = StageTally(), FiniteLogits()
    with seeded(config.seed, device), autocast(config.precision, device):
        numbers, counted = shared_batches(len(batches), ranks)
        for number, batch in enumerate(batches.read(numbers), start=1):
            x, labels_B = normalize(batch.images.to(device), mean, std), batch.labels.to(device)
            with recorded(moe_layers(model) if config.routing else []) as routings:
                logits_BK = unchecked_logits(model(x))
            tally.add(routings, counted=number <= counted)
            check_classes(logits_BK, classes)
            if number > counted:
                continue
            finite.add(logits_BK)
            hits_2 += ranked_hits(logits_BK, labels_B)
            nats.add(functional.cross_entropy(logits_BK, labels_B, reduction="sum"))
            progress(f"accuracy ({mode})", number, len(batches))
    finite.check(f"{batches.images.title}, {config.split}, statistics {mode}", ranks)
    count, hits = len(batches.indices), Hits(*ranks.sum(hits_2).tolist())
    return ImageFigure(
        statistics=mode,
        top1=100 * hits.top1 / count,
        top5=100 * hits.top5 / count if classes > 5 else None,
        loss=ranks.add(nats.total())[0] / count,
        layers=tally.layers(ranks),
    )


def shared_batches(total: int, ranks: Ranks) -> tuple[list[int], int]:
    """Return the numbers of the batches that this process runs, and how many of them count.

    A sharded model needs all processes in every forward pass, so all of them run the same number
    of batches. If the batches cannot be divided evenly, some processes run batch 0 again at the
    end, which does not count.
    """
    own = list(range(ranks.rank, total, ranks.size))
    return own + [0] * (-(-total // ranks.size) - len(own)), len(own)


class Hits(NamedTuple):
    """Number of images whose label is the first prediction, or among the first five."""

    top1: int
    top5: int


def count_hits(logits_BK: Tensor, labels_B: Tensor) -> Hits:
    """Count top-1 and top-5 hits. The lower class wins a tie, as in argmax."""
    return Hits(*ranked_hits(logits_BK, labels_B).tolist())


def ranked_hits(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return (2,) the numbers of top-1 and top-5 hits, on the device of the logits."""
    label_B1 = logits_BK.gather(1, labels_B[:, None])
    earlier_BK = torch.arange(logits_BK.shape[1], device=labels_B.device) < labels_B[:, None]
    ahead_BK = (logits_BK > label_B1) | ((logits_BK == label_B1) & earlier_BK)
    rank_B = ahead_BK.sum(1)
    return torch.stack([(rank_B < 1).sum(), (rank_B < 5).sum()])


def check_classes(logits_BK: Tensor, classes: int) -> None:
    """Check that the model has as many classes as the images."""
    check(
        logits_BK.shape[-1] == classes,
        f"the model knows {logits_BK.shape[-1]} classes, the images have {classes}; use the images "
        "it was trained on",
    )


def moe_layers(model: nn.Module) -> list[MoE | SoftMoE]:
    """List the MoE layers of any model, in order of definition."""
    return [module for module in model.modules() if isinstance(module, MoE | SoftMoE)]
