"""Configs of the image classifiers: the paper's models to the parameter, and what is refused."""

import dataclasses
from typing import Any

import pytest
import torch

from acmoe.config.images.presets import SOFT_VIT_MODELS, SWIN_MODELS, vision_router
from acmoe.config.images.vision import SWIN_GATE, SoftViTConfig, SwinConfig
from acmoe.config.routing import (
    AdaptiveConfig,
    CosineConfig,
    HashConfig,
    LossConfig,
    RandomConfig,
    SMoEConfig,
    SoftConfig,
    StableConfig,
)
from acmoe.config.serialize import decode, encode
from acmoe.errors import UserError
from acmoe.models.count import count_parameters
from acmoe.models.images.swin import SwinModel
from acmoe.models.images.vit import SoftViT
from acmoe.models.registry import build_model, create_model, list_models, model_card
from acmoe.models.table import model_rows

SMALL = SWIN_MODELS["swin-small"].config
TINY = SOFT_VIT_MODELS["softmoe-tiny"].config


def swin(**changes: Any) -> SwinConfig:
    return dataclasses.replace(SMALL, **changes)


def count(config: object) -> tuple[int, int]:
    with torch.device("meta"):
        return count_parameters(build_model(config))


def test_swin_small_has_the_published_parameters() -> None:
    widths = (96, 192, 384, 768)
    parts = {
        "experts": 9 * 16 * 2 * 384 * 1536 + 16 * 2 * 768 * 3072,
        "first biases": 16 * (9 * 1536 + 3072),
        "routers": 16 * (9 * 384 + 768),
        "attention": sum(
            n * (4 * w * w + 4 * w) for w, n in zip(widths, SMALL.depths, strict=True)
        ),
        "dense": sum(n * (8 * w * w + 4 * w) for w, n in zip(widths, (2, 2, 9, 1), strict=True)),
        "positions": 24 * 3 * 512 + 512 * (2 * 3 + 2 * 6 + 18 * 12 + 2 * 24),
        "merging": sum(8 * w * w + 8 * w for w in widths[:3]),
        "norms": sum(4 * w * n for w, n in zip(widths, SMALL.depths, strict=True)) + 2 * 768,
        "patches": 4 * 4 * 3 * 96 + 96 + 2 * 96,
        "head": 768 * 1000 + 1000,
    }
    assert parts["attention"] == 15_740_160 and parts["dense"] == 16_091_904
    assert sum(parts.values()) == 280_083_208
    # k = 1 leaves 15 of 16 experts of each layer idle, k = 2 leaves 14.
    expert = 2 * 384 * 1536 + 1536, 2 * 768 * 3072 + 3072
    for k in (1, 2):
        idle = (16 - k) * (9 * expert[0] + expert[1])
        assert count(swin(top_k=k)) == (280_083_208, 280_083_208 - idle)
    assert count(swin(top_k=1))[1] == 49_798_408


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({"last_bias": True}, 280_155_592),
        # 169 offsets for each of the 282 heads, in place of the networks.
        ({"position": "table"}, 280_083_208 - 181_248 + 169 * 282),
        ({"position": "table", "last_bias": True}, 280_022_002),
        ({"num_classes": 21_841}, 296_109_937),
    ],
    ids=str,
)
def test_variants_of_swin_small_have_their_parameters(changes: dict[str, Any], total: int) -> None:
    assert count(swin(**changes))[0] == total


def test_swin_small_is_no_tiny() -> None:
    # Tiny has 6 blocks in its third stage.
    assert round(count(swin(depths=(2, 2, 6, 2)))[0], -6) == 152_000_000


def test_swin_base_has_the_published_parameters_for_every_router_of_the_paper() -> None:
    for router in ("smoe", "adaptive", "random"):
        with torch.device("meta"):
            model = create_model("swin-base", router=router)
        assert count_parameters(model).total == 497_294_696


def test_softmoe_tiny_is_deit_tiny_with_128_experts_in_six_blocks() -> None:
    ffn = 2 * 192 * 768 + 768 + 192
    block = (192 * 576 + 576) + (192 * 192 + 192) + 4 * 192 + ffn
    embeddings = 16 * 16 * 3 * 192 + 192 + 192 + 197 * 192
    deit = embeddings + 12 * block + 2 * 192 + 192 * 1000 + 1000
    assert deit == 5_717_416
    total = deit - 6 * ffn + 6 * (128 * ffn + 128 * 192 + 1)
    assert total == 231_319_342
    assert count(TINY) == (total, total)  # a token meets every expert, through the slots
    assert count(dataclasses.replace(TINY, num_experts=16))[0] == 32_364_334


def test_every_image_classifier_is_listed_built_and_in_the_table() -> None:
    names = ["swin-small", "swin-base", "swin-nano", "softmoe-tiny", "softmoe-nano"]
    assert [name for name in list_models() if name in names] == names
    for name in ("swin-nano", "softmoe-nano"):
        model = create_model(name)
        assert isinstance(model, SwinModel | SoftViT)
        assert model.config == model_card(name).config
    rows = {row.name: row for row in model_rows()}
    assert rows["swin-small"].parameters == 280_083_208
    assert rows["swin-small"].paper.endswith("smoe 76.1, random 74.22, adaptive 76.31")
    assert rows["softmoe-tiny"].parameters == rows["softmoe-tiny"].active_parameters


def test_the_paper_s_setting_of_the_gate_and_its_loss() -> None:
    assert SMALL.router == SMoEConfig(gate="all", noise=1.0)
    assert SMALL.losses == LossConfig(balance=0.0, importance_load=0.1)
    assert swin(tutel=True).losses == LossConfig(balance=0.0, importance_load=0.1, tutel=True)
    assert swin(balance=0.0).losses == LossConfig(balance=0.0)
    # Without noise there is no expected load.
    quiet = SMoEConfig(gate="all")
    assert swin(router=quiet).losses == LossConfig(balance=0.1)
    assert swin(router=AdaptiveConfig(base=quiet)).losses == LossConfig(balance=0.1)
    assert swin(balance_loss="switch", z=0.01).losses == LossConfig(balance=0.1, z=0.01)
    assert (SMALL.capacity_factor, SMALL.expert_dropout, SMALL.init_std) == (1.25, 0.1, 0.005)


def test_names_of_routers_mean_what_vision_means_by_them() -> None:
    adaptive = vision_router("adaptive", SMALL)
    assert adaptive == AdaptiveConfig(base=SWIN_GATE, statistics="batch", eval_statistics="running")
    assert vision_router("smoe", SMALL) == SWIN_GATE
    assert vision_router("random", SMALL) == RandomConfig(base=SWIN_GATE)
    assert vision_router("cosine", SMALL) == CosineConfig(gate="all")
    soft = vision_router("adaptive", TINY)
    assert soft == AdaptiveConfig(
        base=SoftConfig(), mix=8, statistics="batch", eval_statistics="running"
    )
    assert vision_router("smoe", TINY) == vision_router("soft", TINY) == SoftConfig()
    few = dataclasses.replace(TINY, num_experts=4)
    assert vision_router("random", few) == RandomConfig(base=SoftConfig(), mix=4)


def test_a_router_s_config_is_taken_as_it_is_but_for_its_default_base() -> None:
    own = AdaptiveConfig(statistics="sequence", mix=2)
    assert vision_router(own, SMALL) == dataclasses.replace(own, base=SWIN_GATE)
    assert vision_router(own, TINY) == dataclasses.replace(own, base=SoftConfig())
    based = AdaptiveConfig(base=CosineConfig())
    assert vision_router(based, SMALL) == based
    assert vision_router(SMoEConfig(), SMALL) == SMoEConfig()


@pytest.mark.parametrize("card", [*SWIN_MODELS.values(), *SOFT_VIT_MODELS.values()])
def test_configs_survive_json(card: Any) -> None:
    config = dataclasses.replace(
        card.config, router=vision_router("adaptive", card.config), placement=(1, 2)
    )
    assert decode(encode(config), type(config), "test") == config


def test_stages_double_in_width_and_halve_in_side() -> None:
    assert SMALL.widths == (96, 192, 384, 768)
    assert SMALL.windows == (7, 7, 7, 7)
    assert SMALL.maps(224, 224) == ((56, 56), (28, 28), (14, 14), (7, 7))
    assert SMALL.maps(448, 224)[2] == (28, 14)
    # Upstream's 192 pixels in windows of 12: the last map has 6 a side, and is one window.
    upstream = swin(image_size=192, window=12)
    assert upstream.windows == (12, 12, 12, 6)
    assert [SMALL.num_moe_layers(stage) for stage in range(4)] == [0, 0, 9, 1]
    moe = [block for block in range(18) if SMALL.is_moe(2, block)]
    assert moe == [1, 3, 5, 7, 9, 11, 13, 15, 17]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim=0; it must be an integer of at least 1"),
        ({"depths": ()}, "depths=\\(\\); give one integer"),
        ({"heads": (3, 6, 12)}, "differ in length"),
        ({"heads": (3, 6, 12, 7)}, "768 features does not split over 7 heads"),
        ({"moe_stages": (4,)}, "moe_stages=\\(4,\\) asks for experts in the odd blocks of stage 4"),
        ({"depths": (2, 2, 18, 1)}, "asks for experts in the odd blocks of stage 3"),
        ({"top_k": 17}, "top_k=17 exceeds num_experts=16; lower top_k"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0; it must be a positive number, or None"),
        ({"capacity_factor": "1"}, "capacity_factor='1'; it must be a positive number, or None"),
        ({"drop_path": 1.0}, "drop_path=1.0; it must lie in"),
        ({"position": "none"}, "position='none' is unknown; choose one of mlp, table"),
        ({"balance_loss": "none"}, "balance_loss='none' is unknown"),
        ({"balance": -1.0}, "balance=-1.0; it must be 0 or more"),
        ({"init_std": 0.0}, "init_std=0.0; it must be positive"),
        ({"router": "smoe"}, "router='smoe' is no router config"),
        ({"router": SoftConfig()}, "router='soft' fills slots"),
        ({"router": HashConfig()}, "router='hash' routes by token id"),
        ({"router": StableConfig()}, "router='stable' routes by token id"),
        (
            {"router": AdaptiveConfig(base=StableConfig())},
            "router='stable' routes by token id",
        ),
        (
            {"router": AdaptiveConfig(base=SWIN_GATE), "adaptive_stage": 1},
            "adaptive_stage=1 holds no experts for router='adaptive'; choose it among",
        ),
        # 32 divides no side near 220 but 224, whose maps are 56, 28, 14 and 7.
        ({"image_size": 220}, "image_size: 220 is no side .* all 4 stages; make it 224,"),
        (
            {"image_size": 3},
            "image_size: 3 is no side .*; make it 224,",
        ),  # of 32 the first map has 8
        ({"window": 9}, "image_size: 224 is no side .* windows of 9"),
    ],
    ids=str,
)
def test_a_wrong_swin_is_named_with_its_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        swin(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth=0; it must be an integer of at least 1"),
        ({"image_size": 225}, "image_size=225 does not split into patches of 16"),
        ({"heads": 5}, "dim=192 does not split over heads=5"),
        ({"moe_blocks": 13}, "moe_blocks=13 exceeds depth=12"),
        ({"router": SMoEConfig()}, "router='smoe' chooses experts; a softmoe model takes 'soft'"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5; it must lie in"),
    ],
    ids=str,
)
def test_a_wrong_vit_is_named_with_its_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **changes)


def test_sizes_that_windows_do_not_tile_are_refused_with_the_nearest_that_they_do() -> None:
    with pytest.raises(UserError, match=r"images of 224 x 240 pixels: 240 is no .*make it 224,"):
        SMALL.maps(224, 240)
    with pytest.raises(UserError, match=r"images of 400 x 224 pixels: 400 is no .*make it 448,"):
        SMALL.maps(400, 224)
    # Small maps are one window each, whatever their side.
    assert swin(image_size=256, window=8).maps(32, 64) == ((8, 16), (4, 8), (2, 4), (1, 2))


def test_soft_vit_counts_its_patches() -> None:
    assert TINY.num_patches == 196
    assert [block for block in range(12) if TINY.is_moe(block)] == [6, 7, 8, 9, 10, 11]
    assert isinstance(TINY, SoftViTConfig)
