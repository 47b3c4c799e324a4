"""Swin-MoE: window attention over a map that shrinks from stage to stage.

A token keeps its flat index b * Y * X + y * X + x inside a stage, with shifted windows or without,
so its cluster at one MoE layer is still its own at the next. Merging patches makes new tokens of
another width: the routing state starts anew there.

Shapes: B batch, Y rows and X columns of the map, D features.
"""

from torch import Tensor, nn

from acmoe.config.images.vision import SwinConfig
from acmoe.config.routing import base_router
from acmoe.experts.moe import MoE
from acmoe.models.images.classifier import ImageClassifier
from acmoe.models.images.init import trunc_normal_
from acmoe.models.images.layers import (
    FeedForward,
    drop_path_rates,
    init_linear,
    new_state,
    run_blocks,
    scale_branch,
)
from acmoe.models.images.patches import PatchEmbedding, PatchMerging
from acmoe.models.images.window import WindowAttention
from acmoe.routing.layer_plan import LayerPlan, plan_layers
from acmoe.routing.state import RoutingState
from acmoe.routing.topk import TopKRouter


class SwinBlock(nn.Module):
    """Window attention, then one layer: MoE where the plan has a router, dense where it is None."""

    def __init__(
        self, config: SwinConfig, *, stage: int, shifted: bool, plan: LayerPlan | None
    ) -> None:
        super().__init__()
        dim = config.widths[stage]
        self.norm_attention = nn.LayerNorm(dim)
        self.attention = WindowAttention(
            dim=dim,
            heads=config.heads[stage],
            window=config.windows[stage],
            shifted=shifted,
            position=config.position,
        )
        self.norm_layer = nn.LayerNorm(dim)
        self.layer: MoE | FeedForward
        if plan is None:
            self.layer = FeedForward(dim, config.mlp_ratio * dim, last_bias=config.last_bias)
        else:
            self.layer = _moe(config, dim, plan)

    def forward(
        self, x_BYXD: Tensor, state: RoutingState, kept_2B: Tensor | None = None
    ) -> tuple[Tensor, RoutingState]:
        """Return the output (B, Y, X, D) and the state for the next MoE layer.

        `kept_2B` holds each image's weights of the attention and layer branch (stochastic depth).
        """
        kept_attention, kept_layer = (None, None) if kept_2B is None else kept_2B.unbind()
        x_BYXD = x_BYXD + scale_branch(self.attention(self.norm_attention(x_BYXD)), kept_attention)
        h_BYXD = self.norm_layer(x_BYXD)
        if isinstance(self.layer, MoE):
            y_BLD, state = self.layer(h_BYXD.flatten(1, 2), state)
            y_BYXD = y_BLD.view_as(x_BYXD)
        else:
            y_BYXD = self.layer(h_BYXD)
        return x_BYXD + scale_branch(y_BYXD, kept_layer), state


class SwinStage(nn.Module):
    """Blocks of one width and, except in the last stage, the merge into the next stage."""

    def __init__(self, config: SwinConfig, stage: int, drops: list[float]) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.drops = drops
        plans = iter(_plans(config, stage))
        self.blocks = nn.ModuleList(
            SwinBlock(
                config,
                stage=stage,
                shifted=block % 2 == 1,
                plan=next(plans) if config.is_moe(stage, block) else None,
            )
            for block in range(config.depths[stage])
        )
        last = stage == len(config.depths) - 1
        self.merge = None if last else PatchMerging(config.widths[stage])

    def forward(
        self, x_BYXD: Tensor, state: RoutingState, *, checkpoint_blocks: bool = False
    ) -> tuple[Tensor, RoutingState]:
        """Run the blocks and the merge; return the map and the state for the next stage."""
        x_BYXD, state = run_blocks(
            *(self.blocks, self.drops, x_BYXD, state),
            training=self.training,
            checkpoint_blocks=checkpoint_blocks,
        )
        if self.merge is None:
            return x_BYXD, state
        x_BYXD = self.merge(x_BYXD)
        return x_BYXD, new_state(x_BYXD, self.num_experts, state.aux_loss)


class SwinModel(ImageClassifier):
    """Swin-MoE, or with `moe_stages=()` the dense Swin.

    >>> from acmoe.models.registry import create_model
    >>> model = create_model("swin-nano", router="adaptive")
    >>> model(torch.zeros(2, 3, 32, 32)).logits.shape
    torch.Size([2, 10])
    """

    config: SwinConfig

    def __init__(self, config: SwinConfig, *, checkpoint_blocks: bool = False) -> None:
        super().__init__(config, checkpoint_blocks=checkpoint_blocks)
        self.embed = PatchEmbedding(
            channels=config.channels, dim=config.dim, patch=config.patch, norm=True
        )
        drops = iter(drop_path_rates(config.drop_path, sum(config.depths)))
        self.stages = nn.ModuleList(
            SwinStage(config, stage, [next(drops) for _ in range(depth)])
            for stage, depth in enumerate(config.depths)
        )
        self.norm = nn.LayerNorm(config.widths[-1])
        self.head = nn.Linear(config.widths[-1], config.num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights."""
        init_linear(self, self.config.init_std)
        for module in self.modules():
            # Swin-MoE initialises gates like its other weights, unless the config says otherwise.
            if isinstance(module, TopKRouter) and module.config.init == "uniform":
                trunc_normal_(module.embedding, std=self.config.init_std)
                if module.fixed_length is not None:
                    module.fixed_length.update()

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B, D) mean over the last map, and the auxiliary losses."""
        x_BYXD = self.embed(images)
        state = new_state(x_BYXD, self.config.num_experts)
        for stage in self.stages:
            x_BYXD, state = stage(x_BYXD, state, checkpoint_blocks=self.checkpoint_blocks)
        return self.norm(x_BYXD).mean((1, 2)), state.aux_loss

    def check_size(self, height: int, width: int) -> None:
        """Raise a UserError for an image size that does not divide into maps and windows."""
        self.config.maps(height, width)

    @property
    def blocks(self) -> list[nn.Module]:
        """Return the blocks of all stages, first to last."""
        return [block for stage in self.stages for block in stage.blocks]  # type: ignore[union-attr]

    def moe_layers(self) -> list[MoE]:
        """Return the MoE layers, first to last."""
        return [block.layer for block in self.blocks if isinstance(block.layer, MoE)]


def _plans(config: SwinConfig, stage: int) -> list[LayerPlan]:
    """Return the layer plans of a stage's MoE layers."""
    number = config.num_moe_layers(stage)
    if number == 0:
        return []
    if stage == config.adaptive_stage:
        return plan_layers(config.router, config.placement, number)
    return plan_layers(base_router(config.router), "full", number)


def _moe(config: SwinConfig, dim: int, plan: LayerPlan) -> MoE:
    layer = MoE(
        dim=dim,
        hidden=config.mlp_ratio * dim,
        num_experts=config.num_experts,
        top_k=config.top_k,
        router=plan.router,
        next_router=plan.next_router,
        activation="gelu",
        bias=True,
        dropout=config.expert_dropout,
        capacity_factor=config.capacity_factor,
        losses=config.losses,
    )
    if not config.last_bias:
        layer.experts.down_bias = None  # Swin-MoE has only the first bias
    return layer
