"""The named decoders, to the parameter, and what a config refuses."""

import dataclasses

import pytest
import torch

from acmoe.config.routing import (
    AdaptiveConfig,
    CosineConfig,
    HashConfig,
    RandomConfig,
    RouterConfig,
    SMoEConfig,
    SoftConfig,
    StableConfig,
    ThresholdConfig,
)
from acmoe.config.text.language import LANGUAGE_MODELS, LanguageConfig, language_router
from acmoe.errors import UserError
from acmoe.models.count import count_parameters
from acmoe.models.text.decoder import LanguageModel

# Totals, and the sum of the parts below, worked out by hand from the paper's sizes.
TOTALS = {
    "switch-small": 70_603_015,
    "switch-medium": 215_679_863,
    "switch-enwik8": 36_076_813,
    "glam-small": 80_052_711,
    "glam-medium": 220_202_359,
}


def on_meta(config: LanguageConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config)


@pytest.mark.parametrize("name", TOTALS)
def test_a_model_of_the_paper_has_exactly_its_parameters(name: str) -> None:
    config = LANGUAGE_MODELS[name].config
    words, d, h, experts = config.vocab_size, config.dim, config.hidden, 16
    moe, dense = config.sequence.count("moe"), config.sequence.count("ffn")
    expert = 2 * d * h + h + d
    parts = {
        "input table": words * d,
        "output layer": words * d + words,
        "positions": d // 8 * config.span,
        "attention": 4 * d * d * (moe + dense),
        "experts": moe * experts * expert,
        "gates, with bias": moe * (experts * d + experts),
        "the doubled residual's norms": moe * 2 * d,
        "dense layers": dense * expert,
        "three norms a block, one of them idle": (moe + dense) * 6 * d,
    }
    assert sum(parts.values()) == TOTALS[name]
    count = count_parameters(on_meta(config))
    assert count.total == TOTALS[name]
    # Two of sixteen experts work on a token.
    assert count.active == TOTALS[name] - moe * 14 * expert


@pytest.mark.parametrize("name", TOTALS)
def test_adaptive_clustering_adds_no_parameter(name: str) -> None:
    config = LANGUAGE_MODELS[name].config
    adaptive = dataclasses.replace(config, router=language_router("adaptive", config))
    assert count_parameters(on_meta(adaptive)).total == TOTALS[name]


def test_other_routers_cost_what_their_definitions_say() -> None:
    # Switch-medium: 6 gates of 16 * 352 + 16 are replaced.
    config = LANGUAGE_MODELS["switch-medium"].config
    linear = 6 * (16 * 352 + 16)
    for router, size in (
        (CosineConfig(), 8 * 352 + 16 * 8 + 1),  # R to 8 dimensions, 16 embeddings, a temperature
        (StableConfig(legacy=True), 16 * 352),
        (HashConfig(), 0),
    ):
        total = count_parameters(on_meta(dataclasses.replace(config, router=router))).total
        assert total == TOTALS["switch-medium"] - linear + 6 * size


def test_idle_norms_are_counted_but_never_trained() -> None:
    model = on_meta(LANGUAGE_MODELS["glam-small"].config)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 2 * 6
    assert all(".norm_idle." in name for name in frozen)


def test_modern_blocks_have_no_idle_parameters() -> None:
    config = dataclasses.replace(LANGUAGE_MODELS["glam-nano"].config, norm="pre", position="rope")
    model = LanguageModel(config)
    tokens = torch.arange(12).view(2, 6)
    out = model(tokens, tokens)
    assert out.loss is not None
    (out.loss + out.aux_loss).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    # Two norms a block and one at the end, no position table, no doubled residual.
    assert sum("norm" in name for name, _ in model.named_parameters()) == 2 * (2 * 6 + 1)
    assert model.positions is None


@pytest.mark.parametrize("name", ["switch-nano", "glam-nano"])
def test_every_trainable_parameter_of_the_paper_s_block_gets_a_gradient(name: str) -> None:
    model = LanguageModel(LANGUAGE_MODELS[name].config)
    tokens = torch.arange(256).view(2, 128)
    out = model(tokens, tokens)
    assert out.loss is not None
    (out.loss + out.aux_loss).backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []


def test_weights_begin_as_the_paper_s_do() -> None:
    torch.manual_seed(0)
    config = LANGUAGE_MODELS["glam-nano"].config
    model = LanguageModel(config)
    block, dense = model.blocks[0], model.blocks[1]
    # U(-b, b) with b = 1/sqrt(64) = 0.125 has its largest of 4,096 draws just below b.
    for weight in (block.attention.query.weight, dense.layer.up.weight, block.layer.experts.up):
        assert 0.99 * 0.125 < weight.abs().max().item() <= 0.125
    assert not block.layer.experts.up_bias.any()
    for table in (model.embed.weight, model.positions):
        assert table is not None
        assert table.std().item() == pytest.approx(1.0, abs=0.05)
    published = LanguageModel(dataclasses.replace(config, expert_init="published"))
    largest = published.blocks[0].layer.experts.up.abs().max().item()
    assert 0.99 / 64 < largest <= 1 / 64


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        ("smoe", SMoEConfig(bias=True)),
        ("threshold", ThresholdConfig(bias=True)),
        ("adaptive", AdaptiveConfig(base=SMoEConfig(bias=True))),
        ("random", RandomConfig(base=SMoEConfig(bias=True))),
        ("stable", StableConfig(vocab_size=256)),
        (SMoEConfig(), SMoEConfig()),
        (AdaptiveConfig(mix=2), AdaptiveConfig(mix=2, base=SMoEConfig(bias=True))),
        (AdaptiveConfig(base=CosineConfig()), AdaptiveConfig(base=CosineConfig())),
        (StableConfig(vocab_size=300), StableConfig(vocab_size=300)),
        (AdaptiveConfig(base=StableConfig()), AdaptiveConfig(base=StableConfig(vocab_size=256))),
    ],
)
def test_a_router_by_name_is_the_language_model_s(
    router: str | RouterConfig, expected: RouterConfig
) -> None:
    assert language_router(router, LANGUAGE_MODELS["switch-nano"].config) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 66}, "dim=66 does not split over heads=4"),
        ({"dim": 12, "position": "rope"}, "dim / heads = 3 is odd"),
        ({"top_k": 9}, "top_k=9 exceeds num_experts=8"),
        ({"repeats": 0}, "repeats=0"),
        ({"span": 1.5}, "span=1.5"),
        ({"layers": ()}, "layers=\\(\\)"),
        ({"layers": ("moe", "dense")}, "'dense'"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"balance": -1.0}, "balance=-1.0"),
        ({"norm": "rms"}, "norm='rms'"),
        ({"position": "alibi"}, "position='alibi'"),
        ({"expert_init": "zeros"}, "expert_init='zeros'"),
        ({"empty_memory": "ones"}, "empty_memory='ones'"),
        ({"empty_memory": "zeros", "norm": "pre"}, "needs norm='post'"),
        ({"router": "smoe"}, "router='smoe' is no router config"),
        ({"router": SoftConfig()}, "router='soft' mixes"),
        ({"router": AdaptiveConfig(base=SoftConfig())}, "router='soft' mixes"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(LANGUAGE_MODELS["switch-nano"].config, **change)  # type: ignore[arg-type]
