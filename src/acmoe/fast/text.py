"""The fast runner of language models.

It computes what the plain runner (models/text/stack.py) computes, with fewer passes over memory:

    projections     one GEMM computes keys and values of memory and segment, in the layout of the
                    attention kernel; the GEMM of the gradient reads the segment alone
    norms           one kernel computes a residual sum, its norms and dropout, and also writes the
                    result in the low precision that the next GEMMs read
    memory          stays in low precision, and with a `StaticMemory` at the same address

Shapes: B batch, L length of the segment, N positions of memory and segment, D features, H heads,
P features of a head.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acmoe.experts.moe import MoE
from acmoe.fast.memory import OpenStaticMemory
from acmoe.fast.projection import merge_heads, project, project_joined
from acmoe.models.text.blocks import Attention, Block, FeedForward, PostNormBlock, PreNormBlock
from acmoe.models.text.cache import BlockCache
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.memory import DecodeCache, OpenMemory
from acmoe.models.text.rotary import rotate
from acmoe.models.text.stack import BlockInputs, recomputes, run_blocks
from acmoe.models.unmodified import modified
from acmoe.ops.attention import window_attention
from acmoe.ops.attention.op import joined_window_attention
from acmoe.ops.attention.support import stored_width
from acmoe.ops.dispatch import log_once, transforming
from acmoe.ops.norm import Normed, add_norm, add_norm_twice
from acmoe.ops.precision import autocast_dtype
from acmoe.ops.recompute import recompute
from acmoe.routing.state import RoutingState

DECODING = "decoding runs a token at a time"


class Carried(NamedTuple):
    """The output of a block, which is the input of the next."""

    x: Tensor  # (B, L, D)
    # (B, L, D) x in the low precision that GEMMs read (post-norm models; otherwise x itself). It
    # receives the gradient of the next block's attention.
    x_low: Tensor
    state: RoutingState


class FastRunner:
    """A value of `LanguageModel.runner` that runs the blocks of a model on the fast path."""

    def __init__(self) -> None:
        self.block: Callable[..., Carried] = run_block

    def compile(self, **options: object) -> None:
        """Compile the function that runs a block; equal blocks share one graph."""
        self.block = torch.compile(run_block, **options)  # type: ignore[call-overload]

    def __call__(
        self,
        model: LanguageModel,
        x: Tensor,
        state: RoutingState,
        memory: OpenMemory,
        inputs: BlockInputs,
    ) -> tuple[Tensor, RoutingState]:
        reason = runner_unsupported(model, memory)
        if reason is not None:
            # The plain runner is slower on a GPU. A user would not look for the reason among infos.
            lossy = x.is_cuda and reason != DECODING
            level = logging.WARNING if lossy else logging.INFO
            log_once(f"the blocks run on the plain path: {reason}", level)
            return run_blocks(model, x, state, memory, inputs)
        if recomputes(model) and isinstance(memory, OpenStaticMemory):
            # Backward reads the context again, when the buffers may hold the next segment.
            memory = memory.concatenating()
        post, low = model.config.norm == "post", memory_dtype(model)
        carried = Carried(x, x, state)
        for depth, block in enumerate(model.blocks):
            carried = _zero_padding(model, carried, inputs.token_mask)
            if post:
                carried = carried._replace(x_low=carried.x_low.to(low))
                context = memory.extend(depth, carried.x_low.detach())
            else:
                context = memory.extend(depth, carried.x)
            call = partial(recompute, self.block) if recomputes(model) else self.block
            carried = call(block, carried, context, inputs, memory.cache(depth))
        return carried.x, carried.state


def _zero_padding(model: LanguageModel, carried: Carried, token_mask: Tensor | None) -> Carried:
    """Set padding to zero in models that read padding as zeros."""
    x = model.blank_padding(carried.x, token_mask)
    return carried if x is carried.x else carried._replace(x=x, x_low=x)


def memory_dtype(model: LanguageModel) -> torch.dtype:
    """Return the dtype of the memory that a call produces.

    In post-norm models only GEMMs read the memory, so it has the dtype of autocast. In pre-norm
    models a norm reads it before the GEMMs, in full precision.
    """
    weight = model.embed.weight
    low = autocast_dtype(weight) if model.config.norm == "post" else None
    return low or weight.dtype


def runner_unsupported(model: LanguageModel, memory: OpenMemory | None = None) -> str | None:
    """Return the reason why the fast runner cannot run this model, or would change its function."""
    if isinstance(memory, DecodeCache):
        return DECODING
    if transforming():
        return "a torch.func transform runs, which differentiates the plain path"
    compiled = isinstance(model.runner, FastRunner) and model.runner.block is not run_block
    for depth, block in enumerate(model.blocks):
        if block._compiled_call_impl is not None and not compiled:
            return f"blocks.{depth} is compiled; compile_blocks (acmoe.fast.compiled) compiles both"
        for name, module, expected in parts(block):
            difference = modified(module, expected)
            if difference is None and isinstance(module, nn.Linear) and module.bias is not None:
                difference = "has a bias"
            if difference is not None:
                path = f"blocks.{depth}.{name}" if name else f"blocks.{depth}"
                return f"{path} {difference}"
    return None


def parts(block: nn.Module) -> Iterator[tuple[str, nn.Module, type[nn.Module]]]:
    """Yield name, module and expected type of the modules that the runner reads without calls."""
    yield "", block, PostNormBlock if isinstance(block, PostNormBlock) else PreNormBlock
    if not isinstance(block, Block):
        return
    attention = block.attention
    yield "attention", attention, Attention
    if isinstance(attention, Attention):
        for name in ("query", "key", "value", "output"):
            yield f"attention.{name}", getattr(attention, name), nn.Linear
    if isinstance(block, PostNormBlock):
        yield "layer", block.layer, MoE if isinstance(block.layer, MoE) else FeedForward
        yield "dropout", block.dropout, nn.Dropout
        yield "norm_attention", block.norm_attention, nn.LayerNorm
        yield "norm_layer", block.norm_layer, nn.LayerNorm
        if block.norm_inner is not None:
            yield "norm_inner", block.norm_inner, nn.LayerNorm


def run_block(
    block: Block,
    carried: Carried,
    context: Tensor,
    inputs: BlockInputs,
    cache: BlockCache | None = None,
) -> Carried:
    """Run one block; the result equals that of `block.forward` up to rounding."""
    run = _post_norm if isinstance(block, PostNormBlock) else _pre_norm
    return run(block, carried, context, inputs, cache)


def _post_norm(
    block: Block, carried: Carried, context: Tensor, inputs: BlockInputs, cache: BlockCache | None
) -> Carried:
    assert isinstance(block, PostNormBlock)
    attended = attend(block.attention, context, inputs, carried.x.shape[1], carried.x_low)
    h = add_norm(carried.x, attended, block.norm_attention)
    if not isinstance(block.layer, MoE):
        assert isinstance(block.layer, FeedForward)
        after = add_norm(h.x, block.layer(h.x_low), block.norm_layer)
        return Carried(after.x, after.x_low, carried.state)
    y, state = _routed(block, h, carried.state, inputs, cache)
    assert block.norm_inner is not None
    after = add_norm_twice(
        h.x,
        y,
        block.norm_inner,
        block.norm_layer,
        dropout=block.dropout.p if block.dropout.training else 0.0,
        grad_alias=h.grad_alias,
    )
    return Carried(after.x, after.x_low, state)


def _routed(
    block: Block, h: Normed, state: RoutingState, inputs: BlockInputs, cache: BlockCache | None
) -> tuple[Tensor, RoutingState]:
    y, state = block.layer(
        h.x,
        state,
        token_mask=inputs.token_mask,
        token_ids=inputs.token_ids,
        cache=None if cache is None else cache.routing,
        expert_input=None if h.x_low is h.x else h.x_low,
    )
    return y, state


def _pre_norm(
    block: Block, carried: Carried, context: Tensor, inputs: BlockInputs, cache: BlockCache | None
) -> Carried:
    context = block.norm_attention(context)
    x = carried.x + attend(block.attention, context, inputs, carried.x.shape[1], None)
    y, state = block.route(block.norm_layer(x), carried.state, inputs, cache)
    x = x + y
    return Carried(x, x, state)


def attend(
    attention: Attention, context: Tensor, inputs: BlockInputs, length: int, segment: Tensor | None
) -> Tensor:
    """Attend from the last `length` positions of the context (B, N, D) to all of it.

    `segment` (B, L, D), if given, receives the gradient; the end of the context is then a detached
    copy of it.
    """
    newest = context[:, -length:] if segment is None else segment
    dropout = attention.dropout if attention.training else 0.0
    if _can_join(attention, newest, inputs.positions, dropout):
        return _attend_joined(attention, context, inputs, newest, segment, dropout)
    q_BHLP = _split(attention, project(newest, segment, attention.query.weight))
    k_BHNP, v_BHNP = (
        _split(attention, project(context, segment, layer.weight))
        for layer in (attention.key, attention.value)
    )
    if inputs.positions is None:
        q_BHLP = rotate(q_BHLP, context.shape[1] - length)
        k_BHNP = rotate(k_BHNP, 0)
    out_BHLP = window_attention(
        q_BHLP,
        k_BHNP,
        v_BHNP,
        span=attention.span,
        positions=inputs.positions,
        key_mask=inputs.key_mask,
        dropout=dropout,
    )
    found: Tensor = attention.output(out_BHLP.transpose(1, 2).flatten(2))
    return found


def _attend_joined(
    attention: Attention,
    context: Tensor,
    inputs: BlockInputs,
    newest: Tensor,
    segment: Tensor | None,
    dropout: float,
) -> Tensor:
    """Compute `attend` with keys and values from one GEMM, in the attention kernel's layout."""
    assert inputs.positions is not None
    width = stored_width(newest.shape[-1] // attention.heads)
    kv_BNA, q_BLD = project_joined(
        context,
        segment,
        newest,
        key=attention.key.weight,
        value=attention.value.weight,
        query=attention.query.weight,
        heads=attention.heads,
        width=width,
    )
    kv_BN2HP = kv_BNA.view(*kv_BNA.shape[:2], 2, attention.heads, width)
    kv_2BHNP = kv_BN2HP.permute(2, 0, 3, 1, 4)
    out_BHLP = joined_window_attention(
        _split(attention, q_BLD),
        kv_2BHNP,
        span=attention.span,
        positions=inputs.positions,
        key_mask=inputs.key_mask,
        dropout=dropout,
    )
    return merge_heads(
        out_BHLP.transpose(1, 2).flatten(2), attention.output.weight, attention.heads
    )


def _can_join(
    attention: Attention, newest: Tensor, positions: Tensor | None, dropout: float
) -> bool:
    """Return True if the attention kernel serves queries shaped as `newest`.

    The op is asked about uninitialised queries of one stream, because the answer depends on shapes
    and dtypes alone.
    """
    dtype = autocast_dtype(newest) or newest.dtype
    q_BHLP = _split(attention, newest.new_empty((1, *newest.shape[1:]), dtype=dtype))
    kernel = window_attention.select(
        q_BHLP, q_BHLP, q_BHLP, span=attention.span, positions=positions, dropout=dropout
    )
    return kernel.name == "triton"


def _split(attention: Attention, x_BND: Tensor) -> Tensor:
    return x_BND.view(*x_BND.shape[:2], attention.heads, -1).transpose(1, 2)
