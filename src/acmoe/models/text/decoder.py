"""The causal language model; Switch and GLaM are two configs of it.

Shapes: B batch, L length of the segment, S positions of memory, T = B * L tokens, D features,
P features of a head, V words.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.config.text.language import LanguageConfig
from acmoe.experts.moe import MoE
from acmoe.models.recorded import recorded
from acmoe.models.text.blocks import BLOCKS
from acmoe.models.text.cache import BlockCache, SegmentCache, SlidingStore
from acmoe.models.text.generate import DecodeSteps, decode_steps, generate
from acmoe.models.text.memory import (
    ConcatMemory,
    DecodeCache,
    Memory,
    OpenMemory,
    SegmentCaches,
    StreamMemory,
)
from acmoe.models.text.segment import blank_ids, check_padding, check_segment, joined_mask
from acmoe.models.text.stack import BlockInputs, BlockRunner, run_blocks
from acmoe.models.unmodified import modified
from acmoe.ops.cross_entropy.op import IGNORED, chunked_cross_entropy
from acmoe.ops.dispatch import log_once
from acmoe.ops.embedding.op import Embedding
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.statistics.prefix import PrefixMoments
from acmoe.routing.layer_plan import plan_layers
from acmoe.routing.router import unwrapped
from acmoe.routing.state import Routing, RoutingState


class LanguageOutput(NamedTuple):
    """The result of a forward pass. `loss` is the cross-entropy alone; train on loss + aux_loss."""

    logits: Tensor | None  # (B, L, V); None where targets were given
    loss: Tensor | None  # () mean nats per scored token
    aux_loss: Tensor  # () weighted auxiliary losses of all MoE layers
    memory: Memory  # for the next segment of the same streams
    routings: tuple[Routing, ...] | None  # one per MoE layer, if requested


class LanguageModel(nn.Module):
    """A decoder with MoE layers. Memory and routing state are arguments and results.

    With `checkpoint_blocks=True` backward recomputes the activations inside a block. Routing
    choices are saved, so that rounding cannot send a token to another expert the second time.

    `runner` runs the blocks and `decode_steps` decodes; `acmoe.fast.accelerate` may replace both.
    """

    def __init__(self, config: LanguageConfig, *, checkpoint_blocks: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = checkpoint_blocks
        self.runner: BlockRunner = run_blocks
        self.decode_steps: DecodeSteps = decode_steps
        plans = iter(
            plan_layers(
                config.router,
                config.placement,
                max(1, config.num_moe_layers),
                plain=config.plain_router,
            )
        )
        self.embed = Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            BLOCKS[config.norm](config, next(plans) if layer == "moe" else None)
            for layer in config.sequence
        )
        # One relative-position embedding for all heads and layers.
        self.positions: nn.Parameter | None = None
        if config.position == "relative":
            self.positions = nn.Parameter(torch.empty(config.head_dim, config.span))
        self.reset_parameters()
        self.norm = nn.LayerNorm(config.dim) if config.norm == "pre" else nn.Identity()
        self.unembed = nn.Linear(config.dim, config.vocab_size)

    def reset_parameters(self) -> None:
        """Draw the relative-position embedding anew; other modules have their own method."""
        if self.positions is not None:
            nn.init.normal_(self.positions)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        memory: StreamMemory | None = None,
        token_mask: Tensor | None = None,
        return_routings: bool = False,
    ) -> LanguageOutput:
        """Return the logits of every next token, or, given targets, the mean cross-entropy.

        Args:
            tokens: (B, L) ids.
            targets: (B, L) ids of the next tokens, -100 where a prediction is not scored: the token
                there is read as any other, and the loss is the mean over the other predictions.
                The full logits are then never materialised.
            memory: from the previous segment's output; None begins new streams.
            token_mask: (B, L) True for real tokens. Padding must be before a stream's first token
                or after its last, also over several segments; it does not affect results, and its
                targets are not read.
            return_routings: also return each MoE layer's decision.

        Ids outside the vocabulary and padding between tokens raise a UserError on a CPU. On a GPU
        the host does not wait for their values: a device assertion fails with the same text, and
        the process has to be started again. Repeat the call on a CPU to learn the row.
        """
        self._check(tokens, targets, memory, token_mask)
        with recorded(self.moe_layers() if return_routings else []) as routings:
            x_BLD, state, after = self.hidden_states(tokens, memory=memory, token_mask=token_mask)
        logits = loss = None
        if targets is None:
            logits = self.unembed(x_BLD)
        else:
            loss = self.mean_loss(x_BLD, targets, token_mask)
        found = tuple(routings) if return_routings else None
        return LanguageOutput(logits, loss, state.aux_loss, after, found)

    def mean_loss(self, x_BLD: Tensor, targets: Tensor, token_mask: Tensor | None) -> Tensor:
        """Return () the mean cross-entropy of the scored tokens, without materialising all logits.

        Scored are real tokens whose target is not -100; without any the loss is 0. An output layer
        that was wrapped or has hooks is called, and all logits are materialised.
        """
        x_TD, targets_T = x_BLD.flatten(0, 1), targets.flatten()
        mask_T = None if token_mask is None else token_mask.flatten()
        change = modified(self.unembed, nn.Linear)
        if change is not None:
            log_once(f"the loss holds all logits in memory: unembed {change}")
            return self._loss_of_all_logits(x_TD, targets_T, mask_T)
        weight, bias = self.unembed.weight, self.unembed.bias
        return chunked_cross_entropy(x_TD, weight, bias, targets_T, token_mask=mask_T)

    def _loss_of_all_logits(self, x_TD: Tensor, targets_T: Tensor, mask_T: Tensor | None) -> Tensor:
        """Return () the mean cross-entropy of the scored tokens by a call of the output layer."""
        if mask_T is not None:  # no boolean index: torch.compile could not trace it
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0.0)  # padding may hold any values
            targets_T = targets_T.masked_fill(~mask_T, IGNORED)
        logits_TV = self.unembed(x_TD)
        logits_TV = logits_TV.to(accumulation_dtype(logits_TV.dtype))
        targets_T = targets_T.long()  # torch takes no int32 here
        total = F.cross_entropy(logits_TV, targets_T, reduction="sum", ignore_index=IGNORED)
        return total / (targets_T != IGNORED).sum().clamp(min=1)

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        memory: StreamMemory | None = None,
        token_mask: Tensor | None = None,
        cache: DecodeCache | None = None,
    ) -> tuple[Tensor, RoutingState, Memory]:
        """Return the last hidden states (B, L, D), the routing state, and the next memory."""
        if memory is None and cache is None:
            memory = self.new_memory(tokens.shape[0])
        tokens = blank_ids(tokens, token_mask)
        x_BLD = self.embed(tokens)
        state = RoutingState.before(x_BLD, num_clusters=self.config.num_experts)
        key_mask = self._key_mask(tokens, token_mask, memory, cache)
        inputs = BlockInputs(self.positions, key_mask, token_mask, tokens)
        opened = cache or self._opened(memory, tokens.shape[0])
        x_BLD, state = self.runner(self, x_BLD, state, opened, inputs)
        return self.norm(x_BLD), state, opened.next_memory(key_mask)

    @property
    def like(self) -> Tensor:
        """Return a weight whose device and dtype new tensors get."""
        return self.embed.weight

    def _opened(self, memory: StreamMemory | None, num_streams: int) -> OpenMemory:
        span, caches = self.config.span, self._segment_caches(memory, num_streams)
        return ConcatMemory(None, span, caches) if memory is None else memory.open(span, caches)

    def _segment_caches(self, memory: StreamMemory | None, num_streams: int) -> SegmentCaches:
        """Return each block's cache of prefix statistics; () if no router takes them.

        Statistics that the memory lacks begin with no tokens: those of new streams, and of a memory
        saved by a version that did not carry them.
        """
        weight = self.like
        dtype = accumulation_dtype(weight.dtype)
        known = memory.moments if memory is not None else ()
        caches: list[SegmentCache | None] = []
        for depth, block in enumerate(self.blocks):
            if not (isinstance(block.layer, MoE) and unwrapped(block.layer.router).carries_moments):
                caches.append(None)
                continue
            before = known[depth] if known else None
            if before is None:
                sizes = (num_streams, block.layer.num_experts, block.layer.dim)
                before = PrefixMoments.empty(*sizes, device=weight.device, dtype=dtype)
            caches.append(SegmentCache(PrefixMoments(*(moment.to(dtype) for moment in before))))
        return caches if any(caches) else ()

    def blank_padding(self, x_BLD: Tensor, token_mask: Tensor | None) -> Tensor:
        """Set padding to zero in configs that read it (the published model); others mask it."""
        if token_mask is None or self.config.empty_memory == "masked":
            return x_BLD
        return x_BLD.masked_fill(~token_mask[..., None], 0.0)

    def new_memory(self, num_streams: int) -> Memory | None:
        """Return the memory of new streams: None, or zeros as in the published model."""
        if self.config.empty_memory == "masked":
            return None
        weight = self.like
        empty = weight.new_zeros(num_streams, self.config.span, self.config.dim)
        return Memory((empty,) * len(self.blocks))

    def new_cache(self, num_sequences: int) -> DecodeCache:
        """Return an empty decode cache; pass it with the prompt, then with one token at a time."""
        config, weight = self.config, self.embed.weight
        cache = DecodeCache([], SlidingStore(config.span, dim=1))
        for block in self.blocks:
            routing = None
            if isinstance(block.layer, MoE):
                routing = block.layer.new_cache(
                    num_sequences, device=weight.device, dtype=weight.dtype
                )
            cache.blocks.append(BlockCache(config.span, routing))
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
        """Return the MoE layers, first to last."""
        return [block.layer for block in self.blocks if isinstance(block.layer, MoE)]

    def _key_mask(
        self,
        tokens: Tensor,
        token_mask: Tensor | None,
        memory: StreamMemory | None,
        cache: DecodeCache | None,
    ) -> Tensor | None:
        """Return (B, N), True for positions that attention may see, or None: it may see all.

        The published model masks nothing: padding and empty memory are zeros there.
        """
        if self.config.empty_memory == "zeros":
            return None
        if cache is not None:
            return cache.extend_mask(tokens, token_mask)
        return joined_mask(memory, token_mask, tokens)

    def _check(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        memory: StreamMemory | None,
        token_mask: Tensor | None,
    ) -> None:
        check_segment(
            *(tokens, targets, memory, token_mask),
            vocab_size=self.config.vocab_size,
            num_blocks=len(self.blocks),
        )
        masked = self.config.empty_memory == "masked"
        check_padding(memory, token_mask, tokens, masked=masked)
