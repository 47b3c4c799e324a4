"""Accuracy on ImageNet-A and -R, and out-of-distribution detection on ImageNet-O.

B images, K classes of the model, S classes of the shifted set.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acmoe.attacks.target import unchecked_logits
from acmoe.config.images.data import ImageDataConfig, ImageEvaluateConfig
from acmoe.data.images.augment import normalize
from acmoe.data.images.batches import EvaluationImages
from acmoe.data.images.imagenet_shift import Shift, class_subset, images_of
from acmoe.data.images.splits import ImageSet
from acmoe.data.progress import Progress, silent
from acmoe.errors import UserError, check
from acmoe.evaluate.finite import FiniteLogits
from acmoe.evaluate.images.accuracy import check_classes, ranked_hits
from acmoe.evaluate.images.capacity import using_capacity
from acmoe.evaluate.statistics import using_statistics
from acmoe.runtime import autocast, evaluating, pick_device, seeded


@dataclass(frozen=True, kw_only=True)
class ShiftReport:
    """The result on a shifted set, with all settings that it depends on."""

    shift: str
    metric: str  # "top-1 accuracy (%)" or "AUPR (%)"
    value: float
    chance: float  # expected value of random guessing
    images: int
    clean_images: int  # ImageNet-O: number of in-distribution images; otherwise 0
    classes: int  # number of classes the model chooses among
    batch: int
    order: str
    seed: int
    precision: str
    statistics: str
    capacity: float | None  # capacity factor of the experts; None: no token is dropped

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_shift(
    model: nn.Module,
    shift: Shift,
    shifted: ImageSet,
    data: ImageDataConfig,
    config: ImageEvaluateConfig | None = None,
    *,
    classes: Sequence[str],
    clean: ImageSet | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> ShiftReport:
    """Score a classifier on a shifted set, with its predictions restricted to that set's classes.

    ImageNet-A and -R are scored by accuracy. The images of ImageNet-O belong to no class of
    ImageNet; the score is the area under the precision-recall curve of detecting them, by low
    confidence, among the `clean` images of the same classes.

    Args:
        shifted: the set, opened with its own class folders.
        classes: the model's classes in order, as WordNet ids.
        clean: ImageNet's validation images; for ImageNet-O only.
    """
    config, torch_device = config or ImageEvaluateConfig(), pick_device(device)
    subset = torch.from_numpy(class_subset(shift, shifted.classes, classes)).to(torch_device)
    mode = _checked_mode(shift, clean, config)
    model = model.to(torch_device)
    scorer = _Scorer(model, data, config, torch_device, subset, len(classes), progress)
    with (
        using_statistics(model, mode) as used,
        using_capacity(model, config.capacity) as capacity,
        evaluating(model),
    ):
        found = scorer.accuracy(shifted) if clean is None else scorer.detection(shifted, clean)
    return ShiftReport(
        shift=shift,
        **found._asdict(),
        classes=len(subset),
        batch=config.batch,
        order=config.order,
        seed=config.seed,
        precision=config.precision,
        statistics=used,
        capacity=capacity,
    )


def _checked_mode(shift: Shift, clean: ImageSet | None, config: ImageEvaluateConfig) -> str | None:
    """Return the statistics mode, None for the model's own; check that the arguments agree."""
    check(
        (clean is not None) == (shift == "imagenet-o"),
        f"{shift} {'needs' if clean is None else 'takes no'} clean images; imagenet-o alone is "
        "compared with ImageNet's validation images",
    )
    check(len(config.statistics) <= 1, "a shift is scored in one statistics mode; give one")
    return config.statistics[0] if config.statistics else None


def average_precision(positive: NDArray[np.floating], negative: NDArray[np.floating]) -> float:
    """Return sum_n (R_n - R_n-1) P_n over the distinct scores, highest first, not interpolated.

    P_n and R_n are precision and recall with the n-th score as the threshold.
    """
    if len(positive) == 0 or len(negative) == 0:
        raise UserError("the precision-recall curve needs images of both kinds; give some of each")
    score = np.concatenate((positive, negative)).astype(np.float64)
    check(bool(np.isfinite(score).all()), "a confidence is not finite; score another checkpoint")
    is_positive = np.arange(len(score)) < len(positive)
    order = np.argsort(-score, kind="stable")
    score, is_positive = score[order], is_positive[order]
    # Images of equal score are detected together: use the precision at the last of them.
    last = np.flatnonzero(np.append(np.diff(score) != 0, True))
    found = np.cumsum(is_positive)[last]
    precision = found / (last + 1)
    gained = np.diff(found, prepend=0) / len(positive)
    return float((gained * precision).sum())


class _Found(NamedTuple):
    metric: str
    value: float
    chance: float
    images: int
    clean_images: int


@dataclass(frozen=True)
class _Scorer:
    model: nn.Module
    data: ImageDataConfig
    config: ImageEvaluateConfig
    device: torch.device
    subset: Tensor  # (S,) indices of the classes chosen among
    num_classes: int
    progress: Progress

    def batches(self, images: ImageSet) -> EvaluationImages:
        limit = None if self.config.limit is None else min(self.config.limit, len(images))
        return EvaluationImages.of(images, self.data, replace(self.config, limit=limit))

    def accuracy(self, shifted: ImageSet) -> _Found:
        """Return the top-1 accuracy among the classes of `subset`; labels index these."""
        predictions = self._predict(shifted)
        hits = int(torch.stack([ranked_hits(*pair)[0] for pair in predictions]).sum())
        count = sum(len(labels_B) for _, labels_B in predictions)
        return _Found("top-1 accuracy (%)", 100 * hits / count, 100 / len(self.subset), count, 0)

    def detection(self, shifted: ImageSet, clean: ImageSet) -> _Found:
        """Detect out-of-distribution images by their low confidence."""
        shifted_N = self._confidence(shifted)
        clean_N = self._confidence(images_of(clean, shifted.classes))
        chance = 100 * len(shifted_N) / (len(shifted_N) + len(clean_N))
        value = 100 * average_precision(-shifted_N, -clean_N)
        return _Found("AUPR (%)", value, chance, len(shifted_N), len(clean_N))

    def _confidence(self, images: ImageSet) -> NDArray[np.float64]:
        """Return the greatest probability of each image among the classes of `subset`."""
        found = [logits.cpu().double().softmax(-1).amax(-1) for logits, _ in self._predict(images)]
        confidence: NDArray[np.float64] = torch.cat(found).numpy()
        return confidence

    @torch.no_grad()
    def _predict(self, images: ImageSet) -> list[tuple[Tensor, Tensor]]:
        """Return logits (B, S) and labels (B,) of each batch; raise where one is not finite."""
        mean, std = self.data.normalization
        batches, finite, found = self.batches(images), FiniteLogits(), []
        with seeded(self.config.seed, self.device), autocast(self.config.precision, self.device):
            for number, batch in enumerate(batches, start=1):
                x = normalize(batch.images.to(self.device), mean, std)
                logits_BK = unchecked_logits(self.model(x))
                finite.add(logits_BK)
                check_classes(logits_BK, self.num_classes)
                found.append((logits_BK[:, self.subset], batch.labels.to(self.device)))
                self.progress(images.title, number, len(batches))
        finite.check(images.title)
        return found
