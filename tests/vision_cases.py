"""Small classifiers and images for the tests of vision.

B images of S pixels a side, L patches of an image, D features.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from acmoe import AdaptiveConfig, LossConfig, MoE, RoutingState, fold_statistics
from acmoe.config.images.data import AugmentConfig, ImageDataConfig
from acmoe.config.routing import RouterConfig
from acmoe.data.images.arrays import ArrayImages
from acmoe.data.images.augment import normalize
from acmoe.data.images.batches import TrainingImages
from acmoe.data.images.load import load_images
from acmoe.data.images.splits import ImageSet

EXPERTS = 4
PLAIN = ImageDataConfig(size=8)  # digits as they are
DIGITS = tuple("0123456789")
BATCH_STATISTICS = AdaptiveConfig(statistics="batch")


class Answer(NamedTuple):
    logits: Tensor
    aux_loss: Tensor


class TinyMoE(nn.Module):
    """Patches of 2 x 2 pixels of an 8 x 8 image, two MoE layers, and a head on all patches."""

    def __init__(
        self,
        router: str | RouterConfig = "adaptive",
        *,
        num_classes: int = 10,
        dim: int = 16,
        balance: float = 0.01,
        capacity: float | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 2, stride=2)
        self.layers = nn.ModuleList(
            MoE(
                dim=dim,
                hidden=2 * dim,
                num_experts=EXPERTS,
                top_k=2,
                router=router,
                losses=LossConfig(balance=balance),
                capacity_factor=capacity,
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.head = nn.Linear(16 * dim, num_classes)

    def forward(self, images: Tensor) -> Answer:
        x_BLD = self.embed(images).flatten(2).mT
        B, L, D = x_BLD.shape
        state = RoutingState.identity(num_tokens=B * L, num_clusters=EXPERTS, dim=D)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y_BLD, state = layer(norm(x_BLD), state)
            x_BLD = x_BLD + y_BLD
        return Answer(self.head(x_BLD.flatten(1)), state.aux_loss)


class Linear(nn.Module):
    """logits = W x + b on all pixels: every gradient is known."""

    def __init__(self, num_classes: int, side: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 * side * side, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


class Convolutional(nn.Module):
    """A small network without experts, curved enough to have a changing gradient."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU())
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images).mean((2, 3)))
        return logits


def seeded_model(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with weights drawn from a seed; the test's own random stream stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def trained_on_digits(
    router: str | RouterConfig = BATCH_STATISTICS, *, steps: int = 80
) -> nn.Module:
    """A TinyMoE that knows nine digits of ten; about a second on one core."""
    model = seeded_model(lambda: TinyMoE(router))
    mean, std = PLAIN.normalization
    batches = TrainingImages(load_images(PLAIN).train, PLAIN, AugmentConfig(), batch=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = next(batches)
        out = model(normalize(batch.images, mean, std))
        loss = functional.cross_entropy(out.logits, batch.labels) + out.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fold_statistics(model)
    batches.close()
    return model


def random_images(
    labels: Sequence[int],
    *,
    side: int = 8,
    classes: Sequence[str] = DIGITS,
    seed: int = 0,
) -> ImageSet:
    """Noise with labels."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (len(labels), side, side, 3), dtype=np.uint8)
    return ArrayImages("noise", classes, Path("noise.npz"), pixels, labels)


def random_pixels(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
