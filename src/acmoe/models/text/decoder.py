"""The causal language model: Switch and GLaM are two configs of this one file.

Shapes: B batch, L length of the segment, S positions of memory, T = B * L tokens, D features,
P features of a head, V words.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acmoe.config.text.language import LanguageConfig
from acmoe.errors import check
from acmoe.experts.moe import MoE
from acmoe.models.recompute import recompute
from acmoe.models.recorded import recorded
from acmoe.models.text.blocks import Block
from acmoe.models.text.cache import BlockCache, DecodeCache, SlidingStore
from acmoe.models.text.generate import generate
from acmoe.ops.checks import check_range
from acmoe.ops.cross_entropy.op import chunked_cross_entropy
from acmoe.ops.embedding.op import Embedding
from acmoe.ops.precision import autocast_dtype
from acmoe.ops.rows import copy_rows
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.placement import place
from acmoe.routing.state import Routing, RoutingState


class Memory(NamedTuple):
    """The last positions of the segments before, up to `span` of them, without gradient."""

    hidden: tuple[Tensor, ...]  # (B, S, D) inputs of each block
    mask: Tensor | None = None  # (B, S) False where a slot is padding; None: all are tokens
    # (B, S + L, D) each, with `hidden` in front, which is then read there: a call of L tokens
    # writes its own behind them, where it would join copies of both.
    rooms: tuple[Tensor, ...] | None = None


class LanguageOutput(NamedTuple):
    """What a forward pass gives. `loss` is the cross-entropy alone; train on loss + aux_loss."""

    logits: Tensor | None  # (B, L, V); None where targets were given
    loss: Tensor | None  # () mean nats per real token
    aux_loss: Tensor  # () weighted auxiliary losses of all MoE layers
    memory: Memory  # for the next segment of the same streams
    routings: tuple[Routing, ...] | None  # one per MoE layer, where asked for


class LanguageModel(nn.Module):
    """A decoder with MoE layers. Pure: memory and routing state come and go as values, but for a
    memory with rooms, behind which a call writes its own.

    With `checkpoint_blocks=True` activations inside a block are computed again in backward;
    routing choices are kept, so that rounding cannot send a token elsewhere the second time.
    """

    def __init__(self, config: LanguageConfig, *, checkpoint_blocks: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = checkpoint_blocks
        placed = iter(place(config.router, config.placement, max(1, config.num_moe_layers)))
        self.embed = Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            Block(config, next(placed) if layer == "moe" else None) for layer in config.sequence
        )
        # One table for all heads and layers.
        self.positions: nn.Parameter | None = None
        if config.position == "relative":
            self.positions = nn.Parameter(torch.randn(config.head_dim, config.span))
        self.norm = nn.LayerNorm(config.dim) if config.norm == "pre" else nn.Identity()
        self.unembed = nn.Linear(config.dim, config.vocab_size)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        memory: Memory | None = None,
        token_mask: Tensor | None = None,
        return_routings: bool = False,
    ) -> LanguageOutput:
        """Logits of every next token, or with targets their mean cross-entropy.

        Args:
            tokens: (B, L) ids.
            targets: (B, L) ids of the tokens that follow. The logits are then never held whole.
            memory: from the previous segment's output; None begins new streams.
            token_mask: (B, L) True for real tokens. Padding stands before a stream's first token or
                after its last; it changes nothing, and its targets are not read.
            return_routings: also return each MoE layer's decision.
        """
        self._check(tokens, targets, memory, token_mask)
        with recorded(self.moe_layers() if return_routings else []) as routings:
            x_BLD, state, memory = self.hidden_states(tokens, memory=memory, token_mask=token_mask)
        logits = loss = None
        if targets is None:
            logits = self.unembed(x_BLD)
        else:
            loss = chunked_cross_entropy(
                x_BLD.flatten(0, 1),
                self.unembed.weight,
                self.unembed.bias,
                targets.flatten(),
                token_mask=None if token_mask is None else token_mask.flatten(),
            )
        found = tuple(routings) if return_routings else None
        return LanguageOutput(logits, loss, state.aux_loss, memory, found)

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        memory: Memory | None = None,
        token_mask: Tensor | None = None,
        cache: DecodeCache | None = None,
    ) -> tuple[Tensor, RoutingState, Memory]:
        """(B, L, D) last hidden states, the last routing state, and the memory they leave."""
        if memory is None and cache is None:
            memory = self.new_memory(tokens.shape[0])
        tokens = _blank(tokens, token_mask)
        x_BLD = lowered_BLD = self.embed(tokens)
        state = RoutingState.identity(
            num_tokens=tokens.numel(),
            num_clusters=self.config.num_experts,
            dim=self.config.dim,
            device=x_BLD.device,
            dtype=accumulation_dtype(x_BLD.dtype),
        )
        key_mask = self._key_mask(tokens, token_mask, memory, cache)
        again = self.checkpoint_blocks and torch.is_grad_enabled()
        kept = []
        for depth, block in enumerate(self.blocks):
            past = memory.hidden[depth] if memory is not None else None
            room = None
            if memory is not None and memory.rooms and self.config.norm == "post" and not again:
                room = memory.rooms[depth]  # not where it is read again, maybe after it has moved
            if token_mask is not None and self.config.empty_memory == "zeros":
                x_BLD = lowered_BLD = x_BLD.masked_fill(~token_mask[..., None], 0.0)
            source = None
            if cache is None:
                if self.config.norm == "post":
                    lowered_BLD = lowered_BLD.to(self.memory_dtype)
                source = self._source(past, lowered_BLD, room)
                kept.append(source.detach()[:, -self.config.span :])
            x_BLD, lowered_BLD, state = (partial(recompute, block) if again else block)(
                x_BLD,
                state,
                table=self.positions,
                source=source,
                lowered=lowered_BLD,
                key_mask=key_mask,
                token_mask=token_mask,
                token_ids=tokens,
                cache=None if cache is None else cache.blocks[depth],
            )
        mask = None if key_mask is None else key_mask[:, -self.config.span :]
        return self.norm(x_BLD), state, Memory(tuple(kept), mask)

    def new_memory(self, num_streams: int) -> Memory | None:
        """What new streams begin with: nothing, or the published model's zeros."""
        if self.config.empty_memory == "masked":
            return None
        weight = self.embed.weight
        empty = weight.new_zeros(num_streams, self.config.span, self.config.dim)
        return Memory((empty,) * len(self.blocks))

    def new_cache(self, num_sequences: int) -> DecodeCache:
        """An empty decode cache; fill it with the prompt, then a token at a time."""
        config, weight = self.config, self.embed.weight
        cache = DecodeCache([], SlidingStore(config.span, dim=1))
        for block in self.blocks:
            slot = None
            if isinstance(block.layer, MoE):
                slot = block.layer.new_cache(
                    num_sequences, device=weight.device, dtype=weight.dtype
                )
            cache.blocks.append(BlockCache(config.span, slot))
        if config.empty_memory == "zeros":
            shape = (num_sequences, config.heads, config.span, config.head_dim)
            for entry in cache.blocks:
                entry.extend(weight.new_zeros(shape), weight.new_zeros(shape))
        return cache

    def generate(
        self, prompt: Tensor | list[Tensor] | list[list[int]], max_new_tokens: int, **options: Any
    ) -> Tensor:
        """Continue prompts; see `acmoe.models.text.generate.generate` for the options."""
        return generate(self, prompt, max_new_tokens, **options)

    def moe_layers(self) -> list[MoE]:
        """The MoE layers, first to last."""
        return [block.layer for block in self.blocks if isinstance(block.layer, MoE)]

    def _key_mask(
        self,
        tokens: Tensor,
        token_mask: Tensor | None,
        memory: Memory | None,
        cache: DecodeCache | None,
    ) -> Tensor | None:
        """(B, N) the positions attention may see. The published model hides none from it: what is
        no token is a slot of zeros there."""
        if self.config.empty_memory == "zeros":
            return None
        if cache is not None:
            return cache.extend_mask(tokens, token_mask)
        return _joined_mask(memory, token_mask, tokens)

    def _source(self, past_BSD: Tensor | None, x_BLD: Tensor, room_BND: Tensor | None) -> Tensor:
        """What a block attends to, (B, S + L, D).

        Its last `span` positions are the next memory. In post-norm blocks products alone read it,
        in the precision they multiply in: so it is held. Gradients go to x itself.
        """
        if self.config.norm == "post":
            x_BLD = x_BLD.detach()
        if past_BSD is None:
            return x_BLD
        num_keys = past_BSD.shape[1] + x_BLD.shape[1]
        fits = room_BND is not None and room_BND.shape[1] == num_keys
        if room_BND is not None and fits and room_BND.dtype == x_BLD.dtype:
            copy_rows(room_BND[:, past_BSD.shape[1] :], x_BLD)
            return room_BND
        return torch.cat([past_BSD.to(x_BLD.dtype), x_BLD], dim=1)

    @property
    def memory_dtype(self) -> torch.dtype:
        """Of the memory a call leaves, here and now: autocast has a say in post-norm models."""
        weight = self.embed.weight
        lowered = autocast_dtype(weight) if self.config.norm == "post" else None
        return lowered or weight.dtype

    def _check(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        memory: Memory | None,
        token_mask: Tensor | None,
    ) -> None:
        check(
            tokens.dim() == 2 and tokens.numel() > 0,
            f"tokens have shape {tuple(tokens.shape)}; pass ids of shape (streams, length)",
        )
        for name, other in (("targets", targets), ("token_mask", token_mask)):
            check(
                other is None or other.shape == tokens.shape,
                f"{name} have shape {other is not None and tuple(other.shape)}; tokens have "
                f"{tuple(tokens.shape)}: give one entry per token",
            )
        for name, ids in (("tokens", tokens), ("targets", targets)):
            if ids is not None:
                check_range(_blank(ids, token_mask), 0, self.config.vocab_size, name)
        if memory is not None:
            check(
                len(memory.hidden) == len(self.blocks)
                and memory.hidden[0].shape[0] == tokens.shape[0],
                f"memory has {len(memory.hidden)} blocks and {memory.hidden[0].shape[0]} streams, "
                f"this call {len(self.blocks)} and {tokens.shape[0]}; pass these streams' memory",
            )


def _blank(ids: Tensor, token_mask: Tensor | None) -> Tensor:
    """Id 0 in place of padding, whose own ids may be anything."""
    return ids if token_mask is None else ids.masked_fill(~token_mask, 0)


def _joined_mask(
    memory: Memory | None, token_mask_BL: Tensor | None, tokens_BL: Tensor
) -> Tensor | None:
    """(B, S + L) the positions attention may see; None when all are real tokens."""
    if token_mask_BL is None and (memory is None or memory.mask is None):
        return None
    parts = []
    if memory is not None:
        shape = memory.hidden[0].shape[:2]
        every = torch.ones(shape, dtype=torch.bool, device=tokens_BL.device)
        parts.append(every if memory.mask is None else memory.mask)
    every = torch.ones_like(tokens_BL, dtype=torch.bool)
    parts.append(every if token_mask_BL is None else token_mask_BL)
    return torch.cat(parts, dim=1)
