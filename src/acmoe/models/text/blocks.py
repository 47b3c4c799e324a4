"""The parts of a decoder: attention, dense layer, and the two kinds of block.

Shapes: B batch, L length of the segment, N positions of the context (earlier ones, then the
segment), D features, H heads, P features of a head.
"""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.config.text.language import LanguageConfig
from acmoe.experts.moe import MoE
from acmoe.models.text.cache import BlockCache
from acmoe.models.text.rotary import rotate
from acmoe.models.text.stack import BlockInputs
from acmoe.ops.attention import window_attention
from acmoe.routing.layer_plan import LayerPlan
from acmoe.routing.state import RoutingState


class Attention(nn.Module):
    """Multi-head attention to a sliding window, without biases; dropout on the probabilities."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.span = config.span
        self.dropout = config.dropout
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        *,
        positions: Tensor | None,
        key_mask: Tensor | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """Attend from x (B, L, D) to the context (B, N, D), whose last L positions are x.

        `positions` is the relative-position embedding; None rotates queries and keys instead. A
        cache holds the keys and values of earlier positions.
        """
        q_BHLP = self._split(self.query(x))
        k_BHNP, v_BHNP = self._split(self.key(context)), self._split(self.value(context))
        if positions is None and cache is None:
            q_BHLP, k_BHNP = rotate(q_BHLP, context.shape[1] - x.shape[1]), rotate(k_BHNP, 0)
        elif positions is None and cache is not None:
            q_BHLP, k_BHNP = cache.rotate(q_BHLP, k_BHNP)
        attend = window_attention if cache is None else cache.attend
        out_BHLP = attend(
            q_BHLP,
            k_BHNP,
            v_BHNP,
            span=self.span,
            positions=positions,
            key_mask=key_mask,
            dropout=self.dropout if self.training else 0.0,
        )
        return cast(Tensor, self.output(out_BHLP.transpose(1, 2).flatten(2)))

    def _split(self, x_BND: Tensor) -> Tensor:
        return x_BND.view(*x_BND.shape[:2], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """Linear, ReLU, dropout, linear: the dense layer of GLaM."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden)
        self.down = nn.Linear(config.hidden, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.dropout(F.relu(self.up(x)))))


class Block(nn.Module):
    """Self-attention, then one layer: MoE if a plan is given, dense if `plan` is None.

    A dense block returns the routing state unchanged. Blocks do not depend on their depth, so that
    `torch.compile` shares one graph among equal blocks.
    """

    def __init__(self, config: LanguageConfig, plan: LayerPlan | None) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.layer = FeedForward(config) if plan is None else _moe(config, plan)
        self.dropout = nn.Dropout(config.dropout)
        self.norm_attention = nn.LayerNorm(config.dim)
        self.norm_layer = nn.LayerNorm(config.dim)

    def forward(
        self,
        x: Tensor,
        state: RoutingState,
        context: Tensor,
        inputs: BlockInputs,
        cache: BlockCache | None = None,
    ) -> tuple[Tensor, RoutingState]:
        """Return the block's output (B, L, D) and the state for the next MoE layer.

        Args:
            x: hidden states of the segment.
            state: from the previous MoE layer, about the same tokens.
            context: (B, N, D) this block's inputs at the positions before the segment, then x.
            inputs: the arguments that all blocks share.
            cache: decoding only; holds the keys and values of the positions before x.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def attend(
        self, x: Tensor, context: Tensor, inputs: BlockInputs, cache: BlockCache | None
    ) -> Tensor:
        """Return the attention output of x to the context."""
        found: Tensor = self.attention(
            x, context, positions=inputs.positions, key_mask=inputs.key_mask, cache=cache
        )
        return found

    def route(
        self, h: Tensor, state: RoutingState, inputs: BlockInputs, cache: BlockCache | None
    ) -> tuple[Tensor, RoutingState]:
        """Apply the block's layer to h, and dropout to the output of an MoE layer."""
        if not isinstance(self.layer, MoE):
            return self.layer(h), state
        y, state = self.layer(
            h,
            state,
            token_mask=inputs.token_mask,
            token_ids=inputs.token_ids,
            cache=None if cache is None else cache.routing,
        )
        return self.dropout(y), state


class PostNormBlock(Block):
    """The paper's block: a norm after each residual sum, and two sums and norms after an MoE."""

    def __init__(self, config: LanguageConfig, plan: LayerPlan | None) -> None:
        super().__init__(config, plan)
        self.norm_inner = None if plan is None else nn.LayerNorm(config.dim)
        # The paper's blocks have three norms, for attention, MoE and dense layer, and use two of
        # them; its parameter counts include the unused one. It is frozen, because no gradient ever
        # reaches it and data-parallel training would wait for one.
        self.norm_idle = nn.LayerNorm(config.dim).requires_grad_(False)

    def forward(
        self,
        x: Tensor,
        state: RoutingState,
        context: Tensor,
        inputs: BlockInputs,
        cache: BlockCache | None = None,
    ) -> tuple[Tensor, RoutingState]:
        h = self.norm_attention(x + self.attend(x, context, inputs, cache))
        y, state = self.route(h, state, inputs, cache)
        if self.norm_inner is not None:
            y = self.norm_inner(h + y)
        return self.norm_layer(h + y), state


class PreNormBlock(Block):
    """The pre-norm block: a norm before each layer, and a residual stream without norms."""

    def forward(
        self,
        x: Tensor,
        state: RoutingState,
        context: Tensor,
        inputs: BlockInputs,
        cache: BlockCache | None = None,
    ) -> tuple[Tensor, RoutingState]:
        context = self.norm_attention(context)
        x = x + self.attend(context[:, -x.shape[1] :], context, inputs, cache)
        y, state = self.route(self.norm_layer(x), state, inputs, cache)
        return x + y, state


BLOCKS: dict[str, type[Block]] = {"post": PostNormBlock, "pre": PreNormBlock}


def _moe(config: LanguageConfig, plan: LayerPlan) -> MoE:
    return MoE(
        dim=config.dim,
        hidden=config.hidden,
        num_experts=config.num_experts,
        top_k=config.top_k,
        router=plan.router,
        next_router=plan.next_router,
        activation="relu",
        bias=True,
        dropout=config.dropout,
        init=config.expert_init,
        losses=config.losses,
    )
