"""Record how the routers of a model route a sample of tokens or image patches.

N sampled tokens, B images, D features, E experts, K experts per token, C = E clusters,
Y rows and X columns of a map of patches, S side of an image in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from acmoe.analyze.measure.scale import cluster_scales
from acmoe.analyze.observe import LayerCall, observed
from acmoe.config.images.data import Capacity, ImageDataConfig
from acmoe.config.updates import Precision
from acmoe.data.images.augment import color, normalize
from acmoe.data.images.batches import EvaluationImages, ImageBatch
from acmoe.data.images.splits import ImageSet
from acmoe.data.text.arrays import Tokens
from acmoe.data.text.loader import EvaluationBatches
from acmoe.errors import check
from acmoe.evaluate.images.accuracy import check_classes
from acmoe.evaluate.images.capacity import capacity_text, using_capacity
from acmoe.evaluate.statistics import own_statistics
from acmoe.models.images.classifier import ImageClassifier
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.memory import Memory
from acmoe.ops.route.reference import first_chosen
from acmoe.routing.rescaling import RescalingRouter
from acmoe.runtime import autocast, evaluating, seeded

# Maps a batch of images and its number to the classifier's input. An attack is such a function.
Reading = Callable[[ImageBatch, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """Routing of one MoE layer. Row n of every (N, ...) tensor belongs to the same token.

    All tensors are on the CPU, floating-point ones in float32.
    """

    input: Tensor  # (N, D) input of the router; (S, D) if `rows` names S of the tokens
    scaled: Tensor  # like `input`: the input multiplied by M, M_k* h in the paper
    affinity: Tensor  # (N, E)
    expert_ids: Tensor  # (N, K) before a capacity, if any, drops tokens; the id E means no expert
    gate: Tensor  # (N, K)
    cluster: Tensor  # (N,) cluster whose M scales the token; -1 if there is none and M = I
    scale: Tensor  # (C, D) mean of M's diagonal over a cluster's sampled tokens; ones without any
    scale_varies: bool  # M differs between tokens of a cluster, so that `scale` is a mean
    adaptive: bool  # the router rescales tokens that have a cluster
    grid: tuple[int, int] | None  # patches: (Y, X), and row n is a patch of image n // (Y X)
    rows: Tensor | None = None  # (S,) the tokens whose input is kept; None: all of them

    def kept(self, value_N: Tensor) -> Tensor:
        """Return the values of the tokens whose input is kept, (S,)."""
        return value_N if self.rows is None else value_N[self.rows]

    @property
    def first(self) -> Tensor:
        """Return the first expert of each token, (N,): its cluster at the next MoE layer."""
        return first_chosen(self.affinity, self.expert_ids)

    @property
    def num_experts(self) -> int:
        return self.affinity.shape[1]

    def clusters_seen(self) -> Tensor:
        """Return (C,) bool: True for clusters that have a token whose input is kept."""
        cluster_S = self.kept(self.cluster)
        return cluster_S[cluster_S >= 0].bincount(minlength=len(self.scale)) > 0

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the image, row and column of each patch, (N,) each."""
        assert self.grid is not None
        rows, columns = self.grid
        patch_N = torch.arange(len(self.cluster))
        place_N = patch_N % (rows * columns)
        return patch_N // (rows * columns), place_N // columns, place_N % columns


@dataclass(frozen=True, kw_only=True)
class RoutingRecord:
    """A sample and its routing at every MoE layer."""

    kind: Literal["tokens", "patches"]
    layers: tuple[LayerRecord, ...]
    token_ids: Tensor | None  # text: (N,) tokens in reading order, the same for every layer
    pixels: Tensor | None  # images: (B, 3, S, S), the classifier's input mapped back to [0, 1]
    labels: Tensor | None  # images: (B,)
    predicted: Tensor | None  # images: (B,)
    loss: float | None  # mean nats per token or image; None: the model predicts no next token
    statistics: str  # mode of the adaptive routers; "none" where there are none
    batch: int  # rows of text, or images, per forward pass
    block: int | None  # text: tokens per row and forward pass
    sample: str  # description of the sample for the reader
    capacity: float | None = None  # capacity factor of the experts; None: no token is dropped

    def same_tokens(self, depth: int) -> bool:
        """Return whether the layer routes the same tokens as the previous one.

        The first layer of a Swin stage does not.
        """
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
    precision: Precision = "fp32",
    seed: int = 0,
    title: str = "the stream",
) -> RoutingRecord:
    """Route the first `tokens` tokens of a stream, cut into `batch` rows, with memory.

    `targets` may be another stream of the same length, such as the clean text if `inputs` is a
    corrupted copy of it. `title` names the stream in the description of the sample.
    """
    _check_layers(model.moe_layers())
    check(tokens >= batch, f"tokens={tokens} do not fill batch={batch} rows; ask for more")
    count, block = min(tokens, len(inputs) - 1), model.config.block
    inputs, targets = inputs[: count + 1], None if targets is None else targets[: count + 1]
    batches = EvaluationBatches(inputs, targets=targets, batch=batch, block=block)
    device = model.embed.weight.device
    with seeded(seed, device), autocast(precision, device), evaluating(model):
        parts = list(_route_text(model, batches, device))
    order_N = torch.cat([part.position for part in parts]).argsort()
    calls = zip(*(part.calls for part in parts), strict=True)
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


class _TextPart(NamedTuple):
    """Routing of one forward pass over a block of text."""

    calls: list[LayerCall]  # one per MoE layer, without padding
    position: Tensor  # (N,) position of each token in the stream
    nats: float  # loss summed over the tokens


def _route_text(
    model: LanguageModel, batches: EvaluationBatches, device: torch.device
) -> Iterator[_TextPart]:
    start_B1 = torch.tensor([start for start, _ in batches.spans])[:, None]
    memory: Memory | None = None
    for number, (tokens_BL, targets_BL, _, mask_BL) in enumerate(batches):
        assert mask_BL is not None
        count = int(mask_BL.sum())
        mask = None if count == mask_BL.numel() else mask_BL.to(device)
        with observed(model.moe_layers()) as calls:
            out = model(tokens_BL.to(device), targets_BL.to(device), memory=memory, token_mask=mask)
        memory = out.memory
        position_BL = start_B1 + number * batches.block + torch.arange(tokens_BL.shape[1])
        real_N = mask_BL.flatten().nonzero()[:, 0]
        real_calls = [call.select(real_N) for call in calls]
        yield _TextPart(real_calls, position_BL.flatten()[real_N], float(out.loss) * count)


@torch.no_grad()
def record_images(
    model: ImageClassifier,
    images: ImageSet,
    data: ImageDataConfig,
    *,
    count: int = 64,
    batch: int = 64,
    precision: Precision = "fp32",
    seed: int = 0,
    reading: Reading | None = None,
    capacity: Capacity = None,
) -> RoutingRecord:
    """Route every patch of the first `count` images in the shuffled order of evaluation.

    `reading` computes the classifier's input from a batch, such as attacked images. By default the
    input is the normalised images. No token is dropped unless a `capacity` is given.
    """
    _check_layers(model.moe_layers())
    device, count = next(model.parameters()).device, min(count, len(images))
    batches = EvaluationImages(images, data, batch=batch, seed=seed, limit=count)
    mean, std = data.normalization
    input_of = reading or (lambda one, _: normalize(one.images, mean, std))
    limited = using_capacity(model, capacity)
    with seeded(seed, device), autocast(precision, device), evaluating(model), limited as factor:
        parts = [_route_images(model, input_of(one, n)) for n, one in enumerate(batches)]
    x = torch.cat([part.x for part in parts])
    logits_BK = torch.cat([part.logits for part in parts])
    label_B = torch.from_numpy(images.labels[batches.indices])
    check_classes(logits_BK, len(images.classes))
    calls = zip(*(part.calls for part in parts), strict=True)
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
        f"batches of {batch}, capacity {capacity_text(factor)}",
        capacity=factor,
    )


class _ImagePart(NamedTuple):
    """Routing of one forward pass over a batch of images, on the CPU."""

    calls: list[LayerCall]  # one per MoE layer, without the class token
    x: Tensor  # (B, 3, S, S) input of the classifier
    logits: Tensor


def _route_images(model: ImageClassifier, x: Tensor) -> _ImagePart:
    device = next(model.parameters()).device
    with observed(model.moe_layers()) as calls:
        logits_BK = model(x.to(device)).logits.float()
    patches = [_without_class_token(call, len(x)) for call in calls]
    return _ImagePart(patches, x.cpu(), logits_BK.cpu())


def _without_class_token(call: LayerCall, images: int) -> LayerCall:
    """Drop the class token of each image if there is one.

    An image has a square number of patches, so any other number of tokens begins with a class
    token.
    """
    tokens = len(call.cluster) // images
    if math.isqrt(tokens) ** 2 == tokens:
        return call
    return call.select((torch.arange(len(call.cluster)) % tokens).nonzero()[:, 0])


def _check_layers(layers: Sequence[object]) -> None:
    check(len(layers) > 0, "the model has no MoE layer; there is no routing to record")


def _layer_record(
    calls: Sequence[LayerCall], *, order_N: Tensor | None = None, images: int | None = None
) -> LayerRecord:
    """Concatenate the calls of one layer. `order_N` sorts the tokens of a text."""

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
        adaptive=isinstance(layer.router, RescalingRouter),
        grid=None if images is None else (math.isqrt(len(cluster_N) // images),) * 2,
    )
