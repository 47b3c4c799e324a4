"""Models by name."""

import pytest
import torch

from acmoe.config.routing import AdaptiveConfig, SMoEConfig
from acmoe.config.text.language import LANGUAGE_MODELS
from acmoe.errors import UserError
from acmoe.models.registry import build_model, create_model, list_models, model_card
from acmoe.models.text.decoder import LanguageModel


def test_the_decoders_of_the_paper_and_two_for_a_laptop_are_listed() -> None:
    assert set(list_models()) >= {
        *("switch-small", "switch-medium", "switch-enwik8", "glam-small", "glam-medium"),
        *("switch-nano", "glam-nano"),
    }


def test_cards_carry_the_paper_s_figures() -> None:
    card = model_card("switch-medium")
    assert dict(card.reported)["adaptive"] == 34.42
    assert card.metric == "test perplexity, WikiText-103"
    assert model_card("switch-nano").reported == ()


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_every_named_decoder_is_built_as_its_card_says(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
    assert isinstance(model, LanguageModel)
    assert model.config == model_card(name).config


def test_models_of_one_seed_differ_in_nothing_but_the_router_s_scale() -> None:
    states = []
    for router in ("smoe", "adaptive", AdaptiveConfig(statistics="prefix", mix=2), "random"):
        torch.manual_seed(0)
        model = create_model("switch-nano", router=router)
        states.append({name: p for name, p in model.named_parameters()})
    for other in states[1:]:
        assert len(other) == len(states[0])
        # The wrapped gate is one module deeper, in the same order.
        for (name, one), (deeper, two) in zip(states[0].items(), other.items(), strict=True):
            assert deeper.replace(".router.base.", ".router.") == name
            assert torch.equal(one, two), name


def test_overrides_change_fields_and_a_config_takes_a_name_s_place() -> None:
    router = AdaptiveConfig(statistics="prefix")
    model = create_model("switch-nano", router=router, vocab_size=11, repeats=2, balance=0.0)
    assert isinstance(model, LanguageModel)
    assert (model.config.vocab_size, model.config.num_moe_layers) == (11, 2)
    assert model.config.balance == 0.0
    assert model.config.router == AdaptiveConfig(statistics="prefix", base=SMoEConfig(bias=True))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("switch-meduim", {}, "did you mean switch-medium"),
        ("resnet", {}, "choose one of switch-small, "),
        (None, {}, "^name=None is no name of a model; choose one of switch-small, "),
        (["switch-nano"], {}, r"^name=\['switch-nano'\] is no name of a model; choose one of "),
        (LANGUAGE_MODELS["switch-nano"].config, {}, r"^name=LanguageConfig\(.*is no name of a"),
        ("switch-nano", {"num_expert": 4}, "no option 'num_expert'; did you mean num_experts"),
        ("switch-nano", {"router": "adaptiv"}, "router='adaptiv' is unknown"),
        ("switch-nano", {"heads": 7}, "dim=64 does not split over heads=7"),
    ],
)
def test_a_wrong_name_gets_the_nearest_right_one(
    name: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        create_model(name, **options)  # type: ignore[arg-type]


def test_only_model_configs_are_built() -> None:
    with pytest.raises(UserError, match="SMoEConfig is no model config"):
        build_model(SMoEConfig())
