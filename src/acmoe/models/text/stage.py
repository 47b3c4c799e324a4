"""One stage of a decoder that several processes run as a pipeline.

Shapes: B batch, L length of the segment, D features.
"""

from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from acmoe.experts.moe import MoE
from acmoe.models.text.blocks import Block
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.generate import decode_steps
from acmoe.models.text.memory import Memory, StreamMemory
from acmoe.models.text.segment import blank_ids
from acmoe.models.text.stack import BlockInputs, run_blocks
from acmoe.routing.boundary import Boundary
from acmoe.routing.state import RoutingState


def cut_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Return the depths of the blocks of each stage: contiguous, and equal in number up to one.

    >>> cut_blocks(5, 2)
    [range(0, 3), range(3, 5)]
    """
    short, longer = divmod(num_blocks, num_stages)
    starts = [stage * short + min(stage, longer) for stage in range(num_stages + 1)]
    return [range(*pair) for pair in pairwise(starts)]


class DecoderStage(LanguageModel):
    """The blocks `depths` of a decoder; the first stage embeds the tokens, the last has the loss.

    The modules are those of `whole`, not copies. The relative-position embedding is in every stage.
    """

    def __init__(self, whole: LanguageModel, depths: range) -> None:
        nn.Module.__init__(self)
        self.config = whole.config
        self.checkpoint_blocks = whole.checkpoint_blocks
        self.runner, self.decode_steps = run_blocks, decode_steps
        self.depths = depths
        self.first, self.last = depths.start == 0, depths.stop == len(whole.blocks)
        self.blocks = nn.ModuleList(whole.blocks[depth] for depth in depths)
        self.positions = whole.positions
        if self.first:
            self.embed = whole.embed
        if self.last:
            self.norm, self.unembed = whole.norm, whole.unembed
        self.before, self.after = (boundary(whole, depth) for depth in (depths.start, depths.stop))

    def forward(  # type: ignore[override]
        self,
        *received: Tensor,
        tokens: Tensor,
        targets: Tensor,
        memory: StreamMemory | None = None,
        token_mask: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], Memory]:
        """Return the tensors for the next stage and the memory of these blocks.

        The last stage returns (1,) mean nats per scored token and (1,) the auxiliary loss of all
        stages instead.

        Args:
            received: the tensors of the stage before; the first stage has none.
            tokens: (B, L) ids.
            targets: (B, L) ids of the next tokens, -100 where a prediction is not scored; only the
                last stage uses them.
            memory: of these blocks, from the previous segment; None begins new streams.
            token_mask: (B, L) True for real tokens.
        """
        self._check(tokens, targets, memory, token_mask)
        begins = memory is None
        if memory is None:
            memory = self.new_memory(tokens.shape[0])
        tokens = blank_ids(tokens, token_mask)
        x_BLD, state = self._begin(tokens) if self.first else self.before.unpack(*received)
        key_mask = self._key_mask(tokens, token_mask, memory, None)
        inputs = BlockInputs(self.positions, key_mask, token_mask, tokens)
        opened = self._opened(memory, tokens.shape[0])
        x_BLD, state = self.runner(self, x_BLD, state, opened, inputs)
        after = opened.next_memory(key_mask)
        if begins:  # it may be a view of x, whose buffer the next segment is received in
            after = after._replace(hidden=(after.hidden[0].clone(), *after.hidden[1:]))
        if not self.last:
            return self.after.pack(x_BLD.to(self.like.dtype), state), after
        loss = self.mean_loss(self.norm(x_BLD), targets, token_mask)
        return (loss.reshape(1), state.aux_loss.reshape(1)), after

    def _begin(self, tokens: Tensor) -> tuple[Tensor, RoutingState]:
        x_BLD = self.embed(tokens)
        return x_BLD, RoutingState.before(x_BLD, num_clusters=self.config.num_experts)

    def hidden_like(self, num_streams: int, length: int) -> Tensor:
        """Return hidden states (B, L, D) on the meta device."""
        return self.like.new_empty(num_streams, length, self.config.dim, device="meta")

    @property
    def like(self) -> Tensor:
        """A weight whose device and dtype new tensors get."""
        return cast(Block, self.blocks[0]).norm_attention.weight


def boundary(model: LanguageModel, depth: int) -> Boundary:
    """Return the cut of a model before the block at `depth`."""
    layers = [block.layer for block in model.blocks[:depth] if isinstance(block.layer, MoE)]
    last = layers[-1].next_state if layers else None
    return Boundary.after(last, num_clusters=model.config.num_experts)
