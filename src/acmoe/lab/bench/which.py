"""List which kernels this machine uses, and the reasons why the others cannot run.

Each op is asked for one call: experts and router of the given shape, attention and norms of
switch-enwik8, map attention of swin-small. Tensors hold no data: ops decide by shape, dtype and
device.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acmoe.config.environment import native_requested, router_saving_requested
from acmoe.config.images.presets import SWIN_MODELS
from acmoe.config.images.vision import SwinConfig
from acmoe.config.text.language import LANGUAGE_MODELS
from acmoe.fast import accelerate, explain
from acmoe.lab.bench.implementations.registry import IMPLEMENTATIONS
from acmoe.lab.bench.models.train import PAPER_TOKENS
from acmoe.lab.bench.shapes import Shape
from acmoe.models.images.window import WindowAttention
from acmoe.models.registry import create_model
from acmoe.ops.attention import window_attention
from acmoe.ops.attention.ring import store_in_ring
from acmoe.ops.attention.support import (
    fused_width,
    hopper_unsupported,
    requested_options,
    saving_unsupported,
    stored_width,
)
from acmoe.ops.cross_entropy.op import cross_entropy_chunk
from acmoe.ops.dispatch import Op
from acmoe.ops.embedding.op import embedding
from acmoe.ops.experts import ExpertWeights, clamped_swiglu, expert_mlp
from acmoe.ops.experts.settings.tables import user_table
from acmoe.ops.map_attention import map_attention
from acmoe.ops.norm import add_norm, add_norm_twice
from acmoe.ops.route import ScaledTokens, route
from acmoe.ops.route.rescaled import rescaled_tokens
from acmoe.ops.route.set_rows import set_rows
from acmoe.ops.sort import Rows, sort_rows
from acmoe.ops.statistics.chosen import clusters_up_to_last
from acmoe.ops.statistics.mixed_scale import mixed_scale
from acmoe.ops.statistics.op import measure_dispersion, measure_scale
from acmoe.ops.statistics.optimum import theorem_weights
from acmoe.ops.statistics.pending import add_batch
from acmoe.ops.statistics.prefix import PrefixMoments, Prior
from acmoe.ops.statistics.prefix.op import measure_prefix, measure_prefix_scale
from acmoe.ops.statistics.running import update_average, update_average_and_scale
from acmoe.ops.statistics.scale import ScaleOptions
from acmoe.ops.unit import unit_rows


class Choice(NamedTuple):
    """A kernel of an op, or a runner of a model, and whether it serves."""

    op: str
    backend: str
    runs: bool  # True for the one that serves
    unsupported: str | None  # the reason why it cannot serve; None: it could


# Numbers of a weight that `which` allocates on a CPU: more than its kernels for small layers serve.
_MOST_IN_MEMORY = 2**26


def which(device: torch.device, dtype: torch.dtype, shape: Shape) -> list[Choice]:
    """Return every kernel of every op, for tokens of `dtype` on `device`.

    Options of the environment are checked, even where this machine would not read them.
    """
    requested_options()
    router_saving_requested()
    native_requested()
    user_table()
    x = torch.empty(1, shape.dim, dtype=dtype, device=device)
    return [
        *_layer(x, shape),
        *_statistics(x, shape),
        *_text(x),
        *_images(x),
        *_runners(device, dtype),
    ]


def baselines(device: torch.device, dtype: torch.dtype, shape: Shape) -> list[Choice]:
    """Return for each baseline of `acmoe bench layer` whether it can take part."""
    x = torch.empty(1, shape.dim, dtype=dtype, device=device)
    reasons = {one.name: one.unsupported(shape, x) for one in IMPLEMENTATIONS}
    return [Choice("baseline", name, why is None, why) for name, why in reasons.items()]


def _ask(op: Op[..., Any], *args: Any, **kwargs: Any) -> Iterator[Choice]:
    """Yield the kernels of an op, for a call with these arguments."""
    serves = op.select(*args, **kwargs).name
    for name, reason in op.reasons(*args, **kwargs).items():
        yield Choice(op.name, name, name == serves, reason)


def _layer(x: Tensor, shape: Shape) -> Iterator[Choice]:
    weights = _weights(x, shape)
    embedding_ED = x.new_empty(shape.num_experts, shape.dim)
    # Two tokens: a single one has a kernel of its own on a CPU.
    x = x.new_empty(2, shape.dim)
    expert_ids = torch.zeros(2, shape.top_k, dtype=torch.int64, device=x.device)
    gate = expert_ids.to(x.dtype)
    ids = expert_ids.flatten()
    rows = Rows(ids, ids, ids.new_zeros(shape.num_experts), ids, ids)
    yield from _ask(
        route, ScaledTokens(x), embedding_ED, None, top_k=shape.top_k, over_selected=True
    )
    yield from _ask(rescaled_tokens, x, None, None)
    yield from _ask(unit_rows, x.float())
    yield from _ask(sort_rows, expert_ids, shape.num_experts)
    experts: dict[str, Any] = {"activation": shape.activation, "complete": True}
    yield from _ask(expert_mlp, x, weights, rows, gate, **experts)
    if expert_mlp.select(x, weights, rows, gate, **experts).name == "triton":
        yield from _expert_gemms(x, weights.up_bias, shape)
    clamped: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "interleaved": True}
    yield from _ask(clamped_swiglu, x.new_empty(1, 2), **clamped)


def _weights(x: Tensor, shape: Shape) -> ExpertWeights:
    """Return weights of this shape; those of a large layer have no memory."""
    E, W, D, F = shape.num_experts, shape.width, shape.dim, shape.hidden
    device = x.device if x.is_cpu and E * W * D <= _MOST_IN_MEMORY else torch.device("meta")

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=x.dtype, device=device)

    up_bias, down_bias = (empty(E, W), empty(E, D)) if shape.bias else (None, None)
    return ExpertWeights(empty(E, W, D), empty(E, D, F), up_bias, down_bias)


def _expert_gemms(x: Tensor, bias: Tensor | None, shape: Shape) -> Iterator[Choice]:
    """Yield the GEMMs of the experts, each of which has a kernel for Hopper and a portable one.

    The Hopper kernels of "up" serve forwards without gradients; all others get Triton's.
    """
    from acmoe.ops.experts.hopper.choice import gathers, pipeline_unsupported
    from acmoe.ops.experts.hopper.up_choice import up_unsupported
    from acmoe.ops.experts.settings.gemms import ROW_GEMMS, WEIGHT_GEMMS
    from acmoe.ops.experts.triton.sizes import Sizes

    sizes = (shape.dim, shape.hidden, shape.num_experts)
    size = Sizes(shape.tokens, *sizes, shape.top_k, shape.activation)
    reason = up_unsupported(x, bias, size, dropout=0.0, keep=False)
    yield from _hopper_or_portable("expert_mlp: up, no gradients", reason)
    for kernel in (*ROW_GEMMS, *WEIGHT_GEMMS):
        where = (kernel, size, x.dtype, x.device)
        gather = kernel not in ("down", "input") and gathers(*where)
        bare = kernel not in ("hidden", "down") or not shape.bias
        reason = pipeline_unsupported(*where, gather=gather, bare=bare)
        yield from _hopper_or_portable(f"expert_mlp: {kernel}", reason)


def _hopper_or_portable(part: str, reason: str | None) -> Iterator[Choice]:
    yield Choice(part, "gluon", reason is None, reason)
    yield Choice(part, "triton", reason is not None, None)


def _statistics(x: Tensor, shape: Shape) -> Iterator[Choice]:
    clusters = shape.num_experts
    assignment = torch.zeros(1, dtype=torch.int64, device=x.device)
    options = ScaleOptions(
        normalize="cluster", strength=None, floor=1e-3, eps=0.0, clamp=None, min_tokens=2
    )
    yield from _ask(measure_dispersion, x, assignment, clusters, measure="mad")
    yield from _ask(measure_scale, x, assignment, clusters, options, measure="mad")
    yield from _ask(clusters_up_to_last, assignment[:, None], assignment[:, None], clusters)
    yield from _ask(set_rows, assignment, 1, clusters)
    moments = PrefixMoments.empty(1, 1, shape.dim, device=x.device, dtype=torch.float32)
    tokens = x[None], assignment[None, :, None], moments
    yield from _ask(measure_prefix, *tokens, measure="mad")
    prior = Prior(moments.mean[0], moments.tokens[0], 16.0)
    yield from _ask(measure_prefix_scale, *tokens, prior, options, measure="mad")
    one = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    yield from _ask(theorem_weights, one, one)
    yield from _ask(mixed_scale, moments.mean[0], assignment[None], assignment[None].float())
    average, weight = x.new_empty(1, shape.dim, dtype=torch.float32), x.float().new_empty(1)
    buffers = (average, weight, average, weight)
    yield from _ask(add_batch, *buffers, 2)
    yield from _ask(update_average, *buffers, 0.99)
    yield from _ask(update_average_and_scale, *buffers, average, 0.99, options)


def _text(x: Tensor) -> Iterator[Choice]:
    """Yield the ops of switch-enwik8 for a whole batch: attention saves weights if they fit."""
    config = LANGUAGE_MODELS["switch-enwik8"].config
    token = x.new_empty(1, config.dim)
    norm = nn.LayerNorm(config.dim, device=x.device)
    ids = torch.zeros(1, dtype=torch.int64, device=x.device)
    yield from _ask(embedding, ids, token)
    yield from _ask(add_norm, token, token, norm)
    yield from _ask(add_norm_twice, token, token, norm, norm)
    yield from _ask(cross_entropy_chunk, token, token, ids, None)
    features, lead = config.head_dim, (PAPER_TOKENS // config.block, config.heads)
    number = x.new_empty(1)
    q = number.expand(*lead, config.block, features)
    k = number.expand(*lead, config.span + config.block, features)
    options: dict[str, Any] = {"span": config.span, "positions": number, "dropout": config.dropout}
    yield from _ask(window_attention, q, k, k, **options)
    if window_attention.select(q, k, k, **options).name == "triton":
        q = number.expand(*lead, config.block, fused_width(features))
        kv = number.expand(2, *lead, config.span + config.block, stored_width(features))
        window = (q, kv, config.span, config.dropout)
        yield from _hopper_or_portable("window_attention: forward", hopper_unsupported(*window))
        yield from _hopper_or_portable("window_attention: backward", saving_unsupported(*window))
    head, ring = x.new_empty(1, 1, 1, features), x.new_empty(1, 1, 8, stored_width(features))
    yield from _ask(store_in_ring, head, head, head, ring, ring, ids, None, 1.0)


def _images(x: Tensor) -> Iterator[Choice]:
    config = SWIN_MODELS["swin-small"].config
    assert isinstance(config, SwinConfig)
    side, heads = config.window, config.heads[0]
    number = x.new_empty(1)
    qkv = number.expand(1, side, side, 3 * config.dim)
    bias = number.expand(heads, side**2, side**2)
    yield from _ask(map_attention, qkv, bias, window=(side, side), shift=(0, 0))


def _runners(device: torch.device, dtype: torch.dtype) -> Iterator[Choice]:
    """Yield the runner of a language model's blocks, and that of Swin's window attention."""
    with torch.device("meta"):
        text = create_model("switch-nano")
    yield from _runner("language model's blocks", explain(text))
    config = SWIN_MODELS["swin-small"].config
    assert isinstance(config, SwinConfig)
    attention = WindowAttention(
        dim=config.dim,
        heads=config.heads[0],
        window=config.window,
        shifted=False,
        position=config.position,
    )
    accelerate(attention.to(device, dtype))
    yield from _runner("Swin's window attention", explain(attention))


def _runner(part: str, reason: str | None) -> Iterator[Choice]:
    yield Choice(part, "fast path", reason is None, reason)
    yield Choice(part, "plain path", reason is not None, None)
