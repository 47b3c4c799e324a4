"""A vision transformer whose last blocks hold SoftMoE layers, plain or adaptive.

Shapes: B batch, L = 1 + patches tokens, the class token first, D features.
"""

from typing import cast

import torch
from torch import Tensor, nn

from acmoe.config.images.vision import SoftViTConfig
from acmoe.config.routing import AdaptiveConfig, RandomConfig, SoftConfig
from acmoe.errors import check
from acmoe.experts.soft import SoftMoE
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
from acmoe.models.images.patches import PatchEmbedding
from acmoe.ops.map_attention.reference import split_heads
from acmoe.routing.layer_plan import LayerPlan, plan_layers
from acmoe.routing.state import RoutingState


class SelfAttention(nn.Module):
    """Multi-head self-attention over the tokens of an image."""

    def __init__(self, *, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x_BLD), self.heads)
        out_BHLP = nn.functional.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.output(out_BHLP.transpose(1, 2).flatten(2)))


class ViTBlock(nn.Module):
    """Self-attention, then one layer: SoftMoE where there is a plan for it, else a dense one."""

    def __init__(self, config: SoftViTConfig, plan: LayerPlan | None) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.dim
        self.norm_attention = nn.LayerNorm(config.dim, eps=1e-6)
        self.attention = SelfAttention(dim=config.dim, heads=config.heads)
        self.norm_layer = nn.LayerNorm(config.dim, eps=1e-6)
        self.layer: SoftMoE | FeedForward
        if plan is None:
            self.layer = FeedForward(config.dim, hidden, last_bias=True)
        else:
            assert isinstance(plan.router, SoftConfig | AdaptiveConfig | RandomConfig)
            self.layer = SoftMoE(
                dim=config.dim,
                hidden=hidden,
                num_experts=config.num_experts,
                router=plan.router,
                next_router=plan.next_router,
                dropout=config.expert_dropout,
            )

    def forward(
        self, x_BLD: Tensor, state: RoutingState, kept_2B: Tensor | None = None
    ) -> tuple[Tensor, RoutingState]:
        """Return the output (B, L, D) and the state for the next MoE layer.

        `kept_2B` holds each image's weights of the attention and layer branch (stochastic depth).
        """
        kept_attention, kept_layer = (None, None) if kept_2B is None else kept_2B.unbind()
        x_BLD = x_BLD + scale_branch(self.attention(self.norm_attention(x_BLD)), kept_attention)
        h_BLD = self.norm_layer(x_BLD)
        if isinstance(self.layer, SoftMoE):
            y_BLD, state = self.layer(h_BLD, state)
        else:
            y_BLD = self.layer(h_BLD)
        return x_BLD + scale_branch(y_BLD, kept_layer), state


class SoftViT(ImageClassifier):
    """A DeiT with SoftMoE layers; token l of image b has index b * L + l in its routings."""

    config: SoftViTConfig

    def __init__(self, config: SoftViTConfig, *, checkpoint_blocks: bool = False) -> None:
        super().__init__(config, checkpoint_blocks=checkpoint_blocks)
        self.embed = PatchEmbedding(
            channels=config.channels, dim=config.dim, patch=config.patch, norm=False
        )
        self.class_token = nn.Parameter(torch.empty(config.dim))
        self.positions = nn.Parameter(torch.empty(1 + config.num_patches, config.dim))
        plans = iter(plan_layers(config.router, config.placement, config.moe_blocks))
        self.blocks = nn.ModuleList(
            ViTBlock(config, next(plans) if config.is_moe(block) else None)
            for block in range(config.depth)
        )
        self.drops = drop_path_rates(config.drop_path, config.depth)
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights."""
        init_linear(self, self.config.init_std)
        trunc_normal_(self.class_token, std=self.config.init_std)
        trunc_normal_(self.positions, std=self.config.init_std)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B, D) final class token, and the auxiliary losses."""
        patches_BLD = self.embed(images).flatten(1, 2)
        class_B1D = self.class_token.expand(len(images), 1, -1)
        x_BLD = torch.cat([class_B1D.to(patches_BLD.dtype), patches_BLD], dim=1) + self.positions
        state = new_state(x_BLD, self.config.num_experts)
        x_BLD, state = run_blocks(
            *(self.blocks, self.drops, x_BLD, state),
            training=self.training,
            checkpoint_blocks=self.checkpoint_blocks,
        )
        return self.norm(x_BLD)[:, 0], state.aux_loss

    def moe_layers(self) -> list[SoftMoE]:
        """Return the SoftMoE layers, first to last."""
        return [block.layer for block in self.blocks if isinstance(block.layer, SoftMoE)]

    def check_size(self, height: int, width: int) -> None:
        """Raise a UserError unless images have the size of the learned positions."""
        size = self.config.image_size
        check(
            (height, width) == (size, size),
            f"images of {height} x {width} pixels; the positions are learned for {size} x {size}: "
            "resize them, or build the model with that image_size",
        )
