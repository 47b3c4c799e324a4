"""Adaptive routers in the mixture-of-experts models of torchtitan 0.3.

torchtitan replaces parts of a model by the overrides that its command line names. Name both:

    --override.imports acmoe.adapters.titan.adaptive_block acmoe.adapters.titan.final_norm

Blocks then hand on `Assigned`: the hidden states and each token's cluster, its first expert in the
MoE layer before. Only integers are added, so that no mixed-precision policy can round them; the
scale M is a buffer of the layer that reads it, a running average over optimizer steps. A token sees
nothing of later tokens. The last norm of the model takes the clusters off again.

B sequences of L tokens, D features, E experts, K of them chosen for a token.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import UserError, check
from acmoe.ops.route.reference import first_chosen
from acmoe.routing.statistics import ClusterStatistics
from acmoe.routing.statistics.registry import register_layer

VERSIONS = ("0.3",)  # torchtitan's interfaces change from version to version


def _check_version() -> None:
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise UserError("torchtitan is missing; run pip install 'acmoe[titan]'") from None
    check(
        found.startswith(tuple(f"{one}." for one in VERSIONS)),
        f"torchtitan {found}: this adapter is written for {' and '.join(VERSIONS)}; run pip "
        "install 'acmoe[titan]'",
    )


_check_version()

from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.models.common.decoder import TransformerBlock  # noqa: E402
from torchtitan.models.common.moe import MoE  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3TransformerBlock  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402


class Assigned(NamedTuple):
    """The tensors that a block hands to the next one.

    A pipeline refuses them between two stages, because this is no plain tuple; taken apart, the
    clusters would arrive as the positions.
    """

    x: Tensor  # (B, L, D)
    cluster: Tensor  # (B, L) int64; -1 before the first MoE layer


class Statistics(ClusterStatistics, Module):  # type: ignore[misc]
    """`ClusterStatistics` that torchtitan can build and initialise."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        adaptive: AdaptiveConfig
        num_clusters: int
        dim: int

    def __init__(self, config: Config) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # torchtitan's trainer may have set bfloat16
        try:
            ClusterStatistics.__init__(
                self, config.adaptive, num_clusters=config.num_clusters, dim=config.dim
            )
        finally:
            torch.set_default_dtype(before)


class AdaptiveMoE(MoE):  # type: ignore[misc]
    """torchtitan's MoE layer, whose router sees M x instead of x; experts see x."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):  # type: ignore[misc]
        adaptive: AdaptiveConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.statistics = Statistics.Config(
            adaptive=config.adaptive,
            num_clusters=config.num_experts,
            dim=config.router.gate.in_features,
        ).build()
        register_layer(self)  # its parameters tell the processes that see other tokens

    def forward(self, x_BLD: Tensor, cluster_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B, L, D) output, and each token's cluster for the next MoE layer."""
        check(
            type(x_BLD) in (Tensor, torch.nn.Parameter),
            f"acmoe.adapters.titan: hidden states are a {type(x_BLD).__name__}; tensor and "
            "sequence parallel are not supported, use parallelism.tensor_parallel_degree 1",
        )
        scores_BLK, ids_BLK, scores_BLE = self.router(
            self._rescale(x_BLD, cluster_BL), self.expert_bias_E
        )
        chosen_BLE = torch.zeros_like(scores_BLE, dtype=torch.bool).scatter_(-1, ids_BLK, True)
        load_E = chosen_BLE.sum(dim=(0, 1))
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert_E.add_(load_E)
        out_BLD = self.routed_experts(x_BLD, scores_BLK, ids_BLK, load_E)
        if self.shared_experts is not None:
            out_BLD = out_BLD + self.shared_experts(x_BLD)
        # The columns of ids_BLK are not sorted: the first one is not the first choice.
        return out_BLD, first_chosen(scores_BLE, ids_BLK)

    def _rescale(self, x_BLD: Tensor, cluster_BL: Tensor) -> Tensor:
        """Return M x, and record the tokens of a training forward; x where there is no cluster."""
        scale_ED = self.statistics.cluster_scale(x_BLD, cluster_BL)
        scale_BLD = scale_ED[cluster_BL.clamp(min=0)]
        scale_BLD = scale_BLD.masked_fill((cluster_BL < 0)[..., None], 1.0)
        scaled_BLD: Tensor = (x_BLD * scale_BLD).to(x_BLD.dtype)
        return scaled_BLD


class _AdaptiveBlock:
    """The forward of the blocks below, whose bases differ in their parts and not in this."""

    attention: Any
    attention_norm: Any
    ffn_norm: Any
    feed_forward: Any
    moe: Any
    moe_enabled: bool

    def forward(
        self, x: Tensor | Assigned, attention_masks: Any, positions: Tensor | None = None
    ) -> Assigned:
        if not isinstance(x, Assigned):  # the first block
            x = Assigned(x, x.new_full(x.shape[:2], -1, dtype=torch.int64))
        h, cluster = x
        h = h + self.attention(self.attention_norm(h), attention_masks, positions)
        if self.moe_enabled:
            y, cluster = self.moe(self.ffn_norm(h), cluster)
        else:
            y = self.feed_forward(self.ffn_norm(h))
        return Assigned(h + y, cluster)


class AdaptiveDeepSeekV3Block(_AdaptiveBlock, DeepSeekV3TransformerBlock):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3TransformerBlock.Config):  # type: ignore[misc]
        pass


class AdaptiveQwen3Block(_AdaptiveBlock, Qwen3TransformerBlock):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):  # type: ignore[misc]
        pass


class FinalNorm(RMSNorm):  # type: ignore[misc]
    """The norm behind the last block: it takes the clusters off."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):  # type: ignore[misc]
        pass

    def forward(self, x: Assigned) -> Tensor:
        check(
            isinstance(x, Assigned),
            "acmoe.adapters.titan.final_norm got hidden states without clusters; name "
            "acmoe.adapters.titan.adaptive_block in --override.imports too",
        )
        out: Tensor = super().forward(x.x)
        return out


# Fields of AdaptiveConfig that may be given with `adaptive_block`.
OPTIONS = (
    *("measure", "momentum", "normalize", "strength", "floor", "eps", "clamp", "min_tokens"),
    "statistics_group",
)
BLOCKS: dict[type[Any], type[Any]] = {
    DeepSeekV3TransformerBlock.Config: AdaptiveDeepSeekV3Block.Config,
    Qwen3TransformerBlock.Config: AdaptiveQwen3Block.Config,
}


@override(  # type: ignore[untyped-decorator]
    target=TransformerBlock.Config, fqns=["layers.*"], description="adaptive routers (acmoe)"
)
def adaptive_block(config: Any, **options: Any) -> Any:
    """Return the config of a block that hands clusters on, its MoE layer with an adaptive router.

    options: fields of `AdaptiveConfig` that OPTIONS names.
    """
    check(
        type(config) in BLOCKS,
        f"acmoe.adapters.titan knows no {type(config).__qualname__}; it serves "
        f"{', '.join(kind.__qualname__ for kind in BLOCKS)}",
    )
    block = derive(config, BLOCKS[type(config)])
    if config.moe is not None:
        check(
            type(config.moe) is MoE.Config,
            f"acmoe.adapters.titan replaces a MoE.Config, not a {type(config.moe).__qualname__}; "
            "leave the other override of the MoE layer out",
        )
        block.moe = derive(config.moe, AdaptiveMoE.Config, adaptive=adaptive_config(**options))
    return block


@override(  # type: ignore[untyped-decorator]
    target=RMSNorm.Config, fqns=["norm"], description="ends the clusters' way (acmoe)"
)
def final_norm(config: Any) -> Any:
    """Return the config of the last norm, which takes `Assigned`."""
    return derive(config, FinalNorm.Config)


def adaptive_config(**options: Any) -> AdaptiveConfig:
    """Return the config of the routers: running statistics of each layer's own tokens."""
    wrong = sorted(set(options) - set(OPTIONS))
    check(
        not wrong,
        f"acmoe.adapters.titan: {', '.join(wrong)} cannot be set; choose from {', '.join(OPTIONS)}",
    )
    return AdaptiveConfig(statistics="running", statistics_of="current", **options)
