"""What the routers of a model did with a stated sample of tokens or patches.

N sampled tokens, B images, D features, E experts, K experts a token, C = E clusters,
Y rows and X columns of a map, S side of an image in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from acmoe.analyze.observe import Seen, observed
from acmoe.config.images.data import ImageDataConfig
from acmoe.config.text.train import Precision
from acmoe.data.images.augment import color, normalize
from acmoe.data.images.batches import EvaluationImages, ImageBatch
from acmoe.data.images.splits import ImageSet
from acmoe.data.text.arrays import Tokens
from acmoe.data.text.loader import EvaluationBatches
from acmoe.errors import check
from acmoe.evaluate.statistics import own_statistics
from acmoe.evaluate.vision import check_classes, evaluating
from acmoe.models.images.classifier import ImageClassifier
from acmoe.models.text.decoder import LanguageModel, Memory
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.baselines import RandomRouter
from acmoe.runtime import autocast, seeded

# A batch of images and its number -> what the classifier reads; an attack is one.
Reading = Callable[[ImageBatch, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """One MoE layer; row n of every tensor is the same token. All on the CPU, in float32."""

    input: Tensor  # (N, D) what came to the router
    scaled: Tensor  # (N, D) what it read, M_k* h in the paper; the input itself where M = I
    affinity: Tensor  # (N, E)
    expert_ids: Tensor  # (N, K) before an expert's capacity drops any; E itself: no expert
    gate: Tensor  # (N, K)
    cluster: Tensor  # (N,) the cluster in whose scale a token was read; -1: none, M = I
    scale: Tensor  # (C, D) mean of M's diagonal over a cluster's sampled tokens; no token: ones
    scale_varies: bool  # tokens of one cluster read different scales, and scale is a mean
    adaptive: bool  # the router rescales tokens that have a cluster
    grid: tuple[int, int] | None  # patches: rows and columns; row n is a patch of image n // (Y X)

    @property
    def first(self) -> Tensor:
        """(N,) the first choice of each token: its cluster at the next MoE layer."""
        return self.affinity.argmax(-1)

    @property
    def num_experts(self) -> int:
        return self.affinity.shape[1]

    def clusters_seen(self) -> Tensor:
        """(C,) bool: some sampled token was read in the cluster's scale."""
        return self.cluster[self.cluster >= 0].bincount(minlength=len(self.scale)) > 0

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """(N,) image, row and column of each patch."""
        assert self.grid is not None
        rows, columns = self.grid
        patch_N = torch.arange(len(self.cluster))
        place_N = patch_N % (rows * columns)
        return patch_N // (rows * columns), place_N // columns, place_N % columns


@dataclass(frozen=True, kw_only=True)
class RoutingRecord:
    """A sample, and how every MoE layer routed it."""

    kind: Literal["tokens", "patches"]
    layers: tuple[LayerRecord, ...]
    token_ids: Tensor | None  # text: (N,) tokens in reading order, of every layer alike
    pixels: Tensor | None  # images: (B, 3, S, S) as read, in [0, 1]
    labels: Tensor | None  # images: (B,)
    predicted: Tensor | None  # images: (B,)
    loss: float  # mean nats per token or image
    statistics: str  # mode of the adaptive routers; "none" where there are none
    batch: int  # rows or images of a forward pass
    block: int | None  # text: tokens of a forward pass in each row
    sample: str  # what was read, in words

    def same_tokens(self, depth: int) -> bool:
        """Whether the layer routes the tokens of the one before it, as stages of Swin do not."""
        if depth == 0:
            return False
        before, here = self.layers[depth - 1], self.layers[depth]
        return before.affinity.shape == here.affinity.shape and before.grid == here.grid


@torch.no_grad()
def record_language(
    model: LanguageModel,
    inputs: Tokens,
    targets: Tokens | None = None,
    *,
    tokens: int = 4096,
    batch: int = 8,
    block: int | None = None,
    precision: Precision = "fp32",
    seed: int = 0,
    title: str = "the stream",
) -> RoutingRecord:
    """Route the first `tokens` tokens of a stream, read in `batch` rows with their memory.

    `targets` may be another stream of the same length: the clean text behind a corrupted one.
    """
    _check_layers(model.moe_layers())
    check(tokens >= batch, f"tokens={tokens} do not fill batch={batch} rows; ask for more")
    count, block = min(tokens, len(inputs) - 1), block or model.config.block
    inputs, targets = inputs[: count + 1], None if targets is None else targets[: count + 1]
    batches = EvaluationBatches(inputs, targets=targets, batch=batch, block=block)
    device = model.embed.weight.device
    with seeded(seed, device), autocast(precision, device), evaluating(model):
        parts = list(_read_text(model, batches, device))
    order_N = torch.cat([part.position for part in parts]).argsort()
    calls = zip(*(part.seen for part in parts), strict=True)
    return RoutingRecord(
        kind="tokens",
        layers=tuple(_layer_record(layer, order_N=order_N) for layer in calls),
        token_ids=torch.from_numpy(inputs[:count].astype("int64")),
        pixels=None,
        labels=None,
        predicted=None,
        loss=sum(part.nats for part in parts) / count,
        statistics=own_statistics(model),
        batch=batch,
        block=block,
        sample=f"the first {count:,} tokens of {title}, in {batch} rows and blocks of {block}",
    )


class _Part(NamedTuple):
    """A block of text."""

    seen: list[Seen]  # one per MoE layer, without padding
    position: Tensor  # (N,) of each token in the stream
    nats: float  # summed over the tokens


def _read_text(
    model: LanguageModel, batches: EvaluationBatches, device: torch.device
) -> Iterator[_Part]:
    start_B1 = torch.tensor([start for start, _ in batches.spans])[:, None]
    memory: Memory | None = None
    for number, (tokens_BL, targets_BL, _, mask_BL) in enumerate(batches):
        assert mask_BL is not None
        count = int(mask_BL.sum())
        mask = None if count == mask_BL.numel() else mask_BL.to(device)
        with observed(model.moe_layers()) as seen:
            out = model(tokens_BL.to(device), targets_BL.to(device), memory=memory, token_mask=mask)
        memory = out.memory
        position_BL = start_B1 + number * batches.block + torch.arange(tokens_BL.shape[1])
        real_N = mask_BL.flatten().nonzero()[:, 0]
        kept = [one.only(real_N) for one in seen]
        yield _Part(kept, position_BL.flatten()[real_N], float(out.loss) * count)


@torch.no_grad()
def record_vision(
    model: ImageClassifier,
    images: ImageSet,
    data: ImageDataConfig,
    *,
    count: int = 64,
    batch: int = 64,
    precision: Precision = "fp32",
    seed: int = 0,
    reading: Reading | None = None,
) -> RoutingRecord:
    """Route every patch of the first `count` images in the shuffled order of evaluation.

    `reading` gives the classifier something else than the images as they are, such as attacked
    ones.
    """
    _check_layers(model.moe_layers())
    device, count = next(model.parameters()).device, min(count, len(images))
    batches = EvaluationImages(images, data, batch=batch, seed=seed, limit=count)
    mean, std = data.normalization
    with seeded(seed, device), autocast(precision, device), evaluating(model):
        looks = [
            _look(model, normalize(one.images, mean, std) if reading is None else reading(one, n))
            for n, one in enumerate(batches)
        ]
    x = torch.cat([look.x for look in looks])
    logits_BK, label_B = torch.cat([look.logits for look in looks]), _labels(batches)
    check_classes(logits_BK, len(images.classes))
    calls = zip(*(look.seen for look in looks), strict=True)
    return RoutingRecord(
        kind="patches",
        layers=tuple(_layer_record(layer, images=count) for layer in calls),
        token_ids=None,
        pixels=x * color(std, x) + color(mean, x),
        labels=label_B,
        predicted=logits_BK.argmax(-1),
        loss=float(functional.cross_entropy(logits_BK.double(), label_B)),
        statistics=own_statistics(model),
        batch=batch,
        block=None,
        sample=f"every patch of {count:,} images of {images.title}, shuffled with seed {seed}, in "
        f"batches of {batch}",
    )


class _Look(NamedTuple):
    """A batch of images, on the CPU."""

    seen: list[Seen]  # one per MoE layer, without the class token
    x: Tensor  # (B, 3, S, S) as the classifier read them
    logits: Tensor


def _look(model: ImageClassifier, x: Tensor) -> _Look:
    device = next(model.parameters()).device
    with observed(model.moe_layers()) as seen:
        logits_BK = model(x.to(device)).logits.float()
    return _Look([_patches(one, len(x)) for one in seen], x.cpu(), logits_BK.cpu())


def _labels(batches: EvaluationImages) -> Tensor:
    return torch.from_numpy(batches.images.labels[batches.indices])


def _patches(seen: Seen, images: int) -> Seen:
    """Without the class token, where there is one: it stands before a square number of patches."""
    tokens = len(seen.cluster) // images
    if math.isqrt(tokens) ** 2 == tokens:
        return seen
    return seen.only((torch.arange(len(seen.cluster)) % tokens).nonzero()[:, 0])


def _check_layers(layers: Sequence[object]) -> None:
    check(len(layers) > 0, "the model has no MoE layer; there is no routing to record")


def _layer_record(
    calls: Sequence[Seen], *, order_N: Tensor | None = None, images: int | None = None
) -> LayerRecord:
    """The calls of a layer under one another; `order_N` sorts the tokens of a text."""

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(list(tensors))
        return whole if order_N is None else whole[order_N]

    layer = calls[0].layer
    scale_ND, cluster_N = joined([c.scale for c in calls]), joined([c.cluster for c in calls])
    scale_CD, varies = cluster_scales(scale_ND, cluster_N, layer.num_experts)
    return LayerRecord(
        input=joined([c.input for c in calls]),
        scaled=joined([c.scaled for c in calls]),
        affinity=joined([c.routing.affinity for c in calls]),
        expert_ids=joined([c.routing.expert_ids for c in calls]),
        gate=joined([c.routing.gate for c in calls]),
        cluster=cluster_N,
        scale=scale_CD,
        scale_varies=varies,
        adaptive=isinstance(layer.router, AdaptiveRouter | RandomRouter),
        grid=None if images is None else (math.isqrt(len(cluster_N) // images),) * 2,
    )


def cluster_scales(scale_ND: Tensor, cluster_N: Tensor, num_clusters: int) -> tuple[Tensor, bool]:
    """(C, D) mean scale of each cluster's tokens, and whether they differ inside a cluster.

    In float64 the mean of equal float32 numbers is that number, so a constant scale comes back bit
    for bit. A cluster without a token has ones.
    """
    own = cluster_N >= 0
    scale_ND, cluster_N = scale_ND[own], cluster_N[own]
    count_C1 = cluster_N.bincount(minlength=num_clusters)[:, None]
    total_CD = torch.zeros(num_clusters, scale_ND.shape[1], dtype=torch.float64)
    total_CD = total_CD.index_add(0, cluster_N, scale_ND.double())
    scale_CD = torch.where(count_C1 > 0, total_CD / count_C1.clamp(min=1), 1.0).float()
    return scale_CD, not torch.equal(scale_CD[cluster_N], scale_ND)
