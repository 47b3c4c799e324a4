"""The parts of a decoder: attention, dense layer, and the two kinds of block.

Shapes: B batch, L length of the segment, N positions in view: before it and in it, D features,
H heads, P features of a head.
"""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.config.routing import AdaptiveConfig, RandomConfig
from acmoe.config.text.language import LanguageConfig
from acmoe.experts.moe import MoE
from acmoe.models.text.attention import joined_width, rotate, window_attention
from acmoe.models.text.cache import BlockCache
from acmoe.models.text.heads import Output, Projection
from acmoe.ops.attention.op import joined_window_attention
from acmoe.ops.norm.op import norm_sum_lowered, norm_sum_twice
from acmoe.ops.precision import autocast_dtype
from acmoe.routing.placement import Placed
from acmoe.routing.state import RoutingState


class Attention(nn.Module):
    """Multi-head attention to a sliding window. No biases; dropout on the probabilities alone."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.span = config.span
        self.dropout = config.dropout
        self.query = Projection(config.dim, config.heads)
        self.key = Projection(config.dim, config.heads)
        self.value = Projection(config.dim, config.heads)
        self.output = Output(config.dim, config.heads)

    def forward(
        self,
        source: Tensor,
        num_queries: int,
        *,
        table: Tensor | None,
        segment: Tensor | None = None,
        key_mask: Tensor | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """Attend from the last `num_queries` of the (B, N, D) source to all of it.

        `table` holds the relative positions; None turns queries and keys by rotary ones instead.
        `segment` (B, L, D) takes the gradient where the source's end is a constant copy of it.
        With a cache the keys and values of earlier positions come from there.
        """
        newest = source[:, -num_queries:] if segment is None else segment
        dropout = self.dropout if self.training else 0.0
        width = self._joined_width(newest, table, dropout) if cache is None else None
        if table is not None and width is not None:
            joined = {"segment": segment, "beside": self.value, "width": width}
            if segment is None:
                kv_BNA, q_BLD = self.key(source, **joined), self.query(newest)
            else:
                kv_BNA, q_BLD = self.key(source, **joined, queries=self.query)
            q_BHLP = self._split(q_BLD)
            kv_2BHNP = kv_BNA.unflatten(2, (2, self.heads, width)).permute(2, 0, 3, 1, 4)
            out_BHLP = joined_window_attention(
                q_BHLP, kv_2BHNP, span=self.span, table=table, key_mask=key_mask, dropout=dropout
            )
            return self._output(out_BHLP)
        q_BHLP = self._split(self.query(newest, segment=segment))
        k_BHNP, v_BHNP = (
            self._split(layer(source, segment=segment)) for layer in (self.key, self.value)
        )
        if table is None:
            first = 0 if cache is None else cache.position
            q_BHLP = rotate(q_BHLP, first + source.shape[1] - num_queries)
            k_BHNP = rotate(k_BHNP, first)
        if cache is not None:
            k_BHNP, v_BHNP = cache.extend(k_BHNP, v_BHNP)
        out_BHLP = window_attention(
            q_BHLP,
            k_BHNP,
            v_BHNP,
            span=self.span,
            table=table,
            key_mask=key_mask,
            dropout=dropout,
        )
        return self._output(out_BHLP)

    def _output(self, x_BHLP: Tensor) -> Tensor:
        return cast(Tensor, self.output(x_BHLP.transpose(1, 2).flatten(2)))

    def _joined_width(self, newest: Tensor, table: Tensor | None, dropout: float) -> int | None:
        """`joined_width` of queries that are not there yet, by a tensor like one stream's."""
        dtype = autocast_dtype(newest) or newest.dtype
        like = newest.new_empty((1, *newest.shape[1:]), dtype=dtype)
        return joined_width(self._split(like), table, dropout)

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
    """Self-attention, then one layer: MoE where a router is `placed`, dense where None is.

    A dense block hands the routing state through.

    norm="post", the paper's: a norm after each sum, and around an MoE layer a second sum and norm.
    norm="pre": norms on the way into each part, and a residual stream nothing else touches.

    Blocks know nothing of their depth, so `torch.compile` shares one graph among equal ones.
    """

    def __init__(self, config: LanguageConfig, placed: Placed | None) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.layer = FeedForward(config) if placed is None else _moe(config, placed)
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"
        self.norm_attention = nn.LayerNorm(config.dim)
        self.norm_layer = nn.LayerNorm(config.dim)
        self.norm_inner: nn.LayerNorm | None = None
        if not self.pre:
            if placed is not None:
                self.norm_inner = nn.LayerNorm(config.dim)
            # The paper's blocks hold a norm for attention, MoE and dense layer each, use two of the
            # three, and its parameter counts include the idle one. Frozen: no gradient ever
            # reaches it, and data-parallel training would wait for one.
            self.norm_idle = nn.LayerNorm(config.dim).requires_grad_(False)

    def forward(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        table: Tensor | None,
        source: Tensor | None = None,
        lowered: Tensor | None = None,
        key_mask: Tensor | None = None,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: BlockCache | None = None,
    ) -> tuple[Tensor, Tensor, RoutingState]:
        """(B, L, D) -> (B, L, D), the same `lowered`, and the state for the next MoE layer.

        Args:
            x: hidden states of the segment.
            state: what the previous MoE layer saw of the same tokens.
            table: (P, span) relative positions, or None for rotary ones.
            source: (B, N, D) this block's inputs at the positions before the segment, then x.
                norm="post": a constant, in any precision. None: x alone.
            lowered: x in the source's precision, which takes the gradient by way of attention: as
                the block before gave it, two gradients then need no pass that adds them. None: x.
                Read by post-norm blocks that are given a source. Whoever changes one of a block's
                two outputs, by a hook say, changes the other.
            key_mask: (B, N) which positions of the source may be attended to.
            token_mask: (B, L) which tokens of the segment are real.
            token_ids: (B, L) for routers that read them.
            cache: decoding only; holds what the source would before x.
        """
        segment = None if source is None or self.pre else x if lowered is None else lowered
        source = x if source is None else source
        seen = self.attention(
            self.norm_attention(source) if self.pre else source,
            x.shape[1],
            table=table,
            segment=segment,
            key_mask=key_mask,
            cache=cache,
        )
        given = x
        again = echo = None
        if self.pre:
            x = given + seen
        else:
            x, again, echo = norm_sum_lowered(given, seen, self.norm_attention)
        y = self.norm_layer(x) if self.pre else x
        if isinstance(self.layer, MoE):
            slot = None if cache is None else cache.routing
            norm = self.norm_layer if self.pre else self.norm_attention
            measured = statistics_source(self.layer.emitter.reader, (given, seen), norm)
            y, state = self.layer(
                y,
                state,
                token_mask=token_mask,
                token_ids=token_ids,
                cache=slot,
                source=measured,
                lowered=again,
            )
        else:
            y = self.layer(y if again is None else again)
        return *self._joined(x, y, echo), state

    def _joined(self, x: Tensor, y: Tensor, echo: Tensor | None) -> tuple[Tensor, Tensor]:
        """x and what its layer made of it, and the same lowered."""
        dropout = self.dropout.p if self.dropout.training and isinstance(self.layer, MoE) else 0.0
        if self.norm_inner is not None:
            return norm_sum_twice(x, y, self.norm_inner, self.norm_layer, dropout, echo=echo)
        if self.pre:
            joined = x + F.dropout(y, dropout)
            return joined, joined
        return norm_sum_lowered(x, y, self.norm_layer)[:2]


def statistics_source(
    reader: AdaptiveConfig | RandomConfig | None, parts: tuple[Tensor, Tensor], norm: nn.LayerNorm
) -> Tensor | None:
    """The tokens `reader` wants measured in place of norm(residual); None: those themselves.

    `parts` of the residual stream are summed where it is wanted.

    With h = g z + b, z the standardized token, the dispersion of h is |g| times that of z, so the
    paper's M divides by g what the norm has just multiplied: h M e = sign(g) z M_z e, up to b, and
    the gain cannot reach the router. M_z, of statistics before it, leaves it in place.
    """
    if not isinstance(reader, AdaptiveConfig) or reader.source == "input":
        return None
    residual = parts[0] + parts[1]
    if reader.source == "residual":
        return residual
    return F.layer_norm(residual, norm.normalized_shape, eps=norm.eps)


def _moe(config: LanguageConfig, placed: Placed) -> MoE:
    return MoE(
        dim=config.dim,
        hidden=config.hidden,
        num_experts=config.num_experts,
        top_k=config.top_k,
        router=placed.router,
        emit=placed.emit,
        activation="relu",
        bias=True,
        dropout=config.dropout,
        init=config.expert_init,
        losses=config.losses,
    )
