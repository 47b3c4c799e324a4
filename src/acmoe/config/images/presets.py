"""Named image classifiers, and the router configs that router names stand for in them."""

from dataclasses import dataclass, replace

from acmoe.config.images.vision import (
    SOFT_SLOTS,
    SWIN_GATE,
    SoftViTConfig,
    SwinConfig,
    VisionConfig,
)
from acmoe.config.routing import (
    AdaptiveConfig,
    CosineConfig,
    RandomConfig,
    RouterConfig,
    SMoEConfig,
    router_config,
)


def vision_router(router: str | RouterConfig, config: VisionConfig) -> RouterConfig:
    """Return the router config that a name or config stands for in an image model.

    "smoe" is the plain router of the model family: Swin-MoE's gate, or SoftMoE's slots. "adaptive"
    uses batch statistics in training and their running average in evaluation, where the statistics
    of one image must not change the result of another; in a SoftMoE model it mixes the scales of 8
    clusters. An adaptive or random-scale router whose base was left at its default wraps the plain
    router, so that the models differ in the scale alone.
    """
    soft = isinstance(config, SoftViTConfig)
    plain = SOFT_SLOTS if soft else SWIN_GATE
    found = router_config(router)
    if router == "smoe":
        return plain
    if isinstance(found, AdaptiveConfig | RandomConfig) and found.base == SMoEConfig():
        found = replace(found, base=plain)
    if not isinstance(router, str):
        return found
    if isinstance(found, CosineConfig):
        return replace(found, gate="all")
    if isinstance(found, AdaptiveConfig):
        found = replace(found, statistics="batch", eval_statistics="running")
    if isinstance(found, AdaptiveConfig | RandomConfig) and soft:
        found = replace(found, mix=min(8, config.num_experts))
    return found


@dataclass(frozen=True, kw_only=True)
class VisionModelCard:
    """A named image classifier: config, description, and the figures the paper reports for it."""

    config: VisionConfig
    description: str
    metric: str | None = None  # name of the measure `reported`; None: not a model of the paper
    reported: tuple[tuple[str, float], ...] = ()  # (router, figure)


_IMAGENET = "top-1 accuracy, ImageNet-1K (%)"

# Parameters of swin-small, at widths 96, 192, 384, 768:
#   experts 9 x 16 x 2 x 384 x 1536 and 16 x 2 x 768 x 3072   245,366,784
#   their first biases 16 x (9 x 1536 + 3072)                     270,336
#   routers 16 x (9 x 384 + 768)                                   67,584
#   attention                                                  15,740,160
#   dense layers, 14 of 24 blocks, without last biases         16,091,904
#   position networks 24 x 3 x 512 + 512 x 282 heads              181,248
#   patch merging 1,553,664, norms 37,632, patches 4,896        1,596,192
#   head 768 x 1000 + 1000                                        769,000
#                                                             280,083,208
SWIN_MODELS: dict[str, VisionModelCard] = {
    "swin-small": VisionModelCard(
        config=SwinConfig(
            dim=96, depths=(2, 2, 18, 2), heads=(3, 6, 12, 24), drop_path=0.2, label_smoothing=0.1
        ),
        description="Swin, 9 + 1 MoE layers of 16 experts, 224 px, 1000 classes (ImageNet)",
        metric=_IMAGENET,
        reported=(("smoe", 76.10), ("random", 74.22), ("adaptive", 76.31)),
    ),
    "swin-base": VisionModelCard(
        # The paper does not state the top-k of this model.
        config=SwinConfig(
            dim=128, depths=(2, 2, 18, 2), heads=(4, 8, 16, 32), drop_path=0.3, label_smoothing=0.1
        ),
        description="Swin, wider: 128 to 1024 features, 9 + 1 MoE layers of 16 experts (ImageNet)",
        metric=_IMAGENET,
        reported=(("smoe", 79.06), ("adaptive", 79.25)),
    ),
    "swin-nano": VisionModelCard(
        config=SwinConfig(
            image_size=32,
            num_classes=10,
            dim=24,
            depths=(2, 6, 2),
            heads=(2, 4, 8),
            window=2,
            mlp_ratio=2,
            moe_stages=(1, 2),
            adaptive_stage=1,
            num_experts=8,
            expert_dropout=0.0,
            drop_path=0.0,
            init_std=0.02,
        ),
        description="Swin, 3 + 1 MoE layers of 8 experts, 32 px, 10 classes (digits), for a CPU",
    ),
}

# Parameters of softmoe-tiny, a DeiT-tiny of 192 features:
#   DeiT-tiny                                                   5,717,416
#   less the six dense layers 2 x 192 x 768 + 768 + 192        -1,775,232
#   six times 128 such experts, 128 slots of 192, one scale   227,377,158
#                                                             231,319,342
SOFT_VIT_MODELS: dict[str, VisionModelCard] = {
    "softmoe-tiny": VisionModelCard(
        config=SoftViTConfig(
            dim=192, depth=12, heads=3, moe_blocks=6, num_experts=128, label_smoothing=0.1
        ),
        description="ViT-tiny, 6 SoftMoE layers of 128 experts, 224 px, 1000 classes (ImageNet)",
        metric=_IMAGENET,
        reported=(("soft", 72.86), ("adaptive", 73.21)),
    ),
    "softmoe-nano": VisionModelCard(
        config=SoftViTConfig(
            image_size=32,
            num_classes=10,
            patch=8,
            dim=64,
            depth=4,
            heads=4,
            mlp_ratio=2,
            moe_blocks=3,
            num_experts=16,
            drop_path=0.0,
            init_std=0.05,  # with 0.02 positions are learned too slowly in so short a run
        ),
        description="ViT, 3 SoftMoE layers of 16 experts, 32 px, 10 classes (digits), for a CPU",
    ),
}
