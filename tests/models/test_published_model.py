"""The model of the published code: its layout, its size, and that it trains."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from acmoe import AdaptiveConfig, RoutingState, SMoEConfig, UserError, plan_layers
from acmoe.config.serialize import decode, encode
from acmoe.config.text.language import LANGUAGE_MODELS, LanguageConfig
from acmoe.config.text.train import override_run
from acmoe.evaluate.language import score_stream
from acmoe.evaluate.language_report import value_of
from acmoe.evaluate.run import open_run
from acmoe.models.count import count_parameters
from acmoe.models.registry import build_model, create_model
from acmoe.models.table import model_rows
from acmoe.recipes import recipe
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.topk import TopKRouter
from acmoe.train.run import train
from tiny_runs import QUIET, byte_corpus

GATE = AdaptiveConfig.preset("reference-lm")
LINEAR = SMoEConfig(bias=True)


def test_the_first_two_layers_are_linear_and_six_are_adaptive() -> None:
    with torch.device("meta"):
        layers = create_model("switch-enwik8-published").moe_layers()
    assert [type(layer.router) for layer in layers] == [TopKRouter] * 2 + [AdaptiveRouter] * 6
    for layer in layers[:2]:
        assert layer.router.config == LINEAR
        assert layer.router.bias.shape == (16,)
    for layer in layers[2:]:
        assert layer.router.config == GATE
        assert layer.router.base.bias is None
        assert layer.router.base.config.normalize_embeddings
    # The layer before an adaptive one makes its clusters; the last makes none.
    follows = [layer.next_state.next_router for layer in layers]
    assert follows == [None, *[GATE] * 6, None]


def test_the_plan_takes_a_router_for_the_layers_outside_the_placement() -> None:
    planned = plan_layers(GATE, "skip-1", 4, plain=LINEAR)
    assert [plan.router for plan in planned] == [LINEAR, LINEAR, GATE, GATE]
    assert [plan.next_router for plan in planned] == [None, GATE, GATE, None]
    control = plan_layers(GATE.base, "skip-1", 4, plain=LINEAR)
    assert control == [(LINEAR, None)] * 2 + [(GATE.base, None)] * 2
    assert plan_layers(GATE, "skip-1", 4) == plan_layers(GATE, "skip-1", 4, plain=GATE.base)
    with pytest.raises(UserError, match="plain='adaptive' rescales its input"):
        plan_layers(GATE, "skip-1", 4, plain="adaptive")


def test_it_has_the_papers_parameters_less_sixteen_biases_in_six_layers() -> None:
    # The published code also makes an unused linear gate in each adaptive layer (16 * 352 + 16).
    rows = {row.name: row for row in model_rows()}
    assert rows["switch-enwik8"].parameters == 36_076_813
    assert rows["switch-enwik8-published"].parameters == 36_076_813 - 6 * 16
    assert rows["switch-nano-published"].parameters == rows["switch-nano"].parameters - 2 * 8
    assert rows["switch-enwik8-published"].paper == "test bits per byte, EnWik-8: adaptive 1.137"


def test_all_other_choices_are_those_of_the_published_code() -> None:
    plain, published = (LANGUAGE_MODELS[f"switch-enwik8{end}"].config for end in ("", "-published"))
    assert published == replace(
        plain,
        router=GATE,
        plain_router=LINEAR,
        placement="skip-1",
        balance=0.0,
        expert_init="published",
        empty_memory="zeros",
    )
    assert (plain.norm, plain.position) == ("post", "relative")
    runs = recipe("switch-enwik8"), recipe("switch-enwik8-published")
    assert replace(runs[1], model=runs[0].model) == runs[0]


@pytest.mark.parametrize("name", ["switch-enwik8-published", "switch-nano-published"])
def test_the_control_is_the_same_with_m_the_identity(name: str) -> None:
    published, control = recipe(name), recipe(f"{name}-control")
    assert replace(control, model=replace(control.model, router=GATE)) == published
    assert control.model.router == GATE.base
    assert control.model.plain_router == LINEAR


def test_the_control_has_the_published_weights_and_differs_in_m_alone() -> None:
    models = []
    for end in ("", "-control"):
        torch.manual_seed(0)
        models.append(build_model(recipe(f"switch-nano-published{end}").model))
    published, control = (dict(model.named_parameters()) for model in models)
    assert {name.replace(".router.base.", ".router.") for name in published} == set(control)
    for name, parameter in published.items():
        assert torch.equal(parameter, control[name.replace(".router.base.", ".router.")])
    assert count_parameters(models[0]) == count_parameters(models[1])
    x = torch.randn(5, 64)
    identity = RoutingState.identity(num_tokens=5, num_clusters=8, dim=64)
    one, two = (model.moe_layers()[2].router(x, identity) for model in models)
    assert torch.equal(one.affinity, two.affinity)


def test_old_configs_read_the_same_and_the_field_survives() -> None:
    stored = encode(LANGUAGE_MODELS["switch-nano"].config)
    del stored["plain_router"]
    assert decode(stored, LanguageConfig, "config.json") == LANGUAGE_MODELS["switch-nano"].config
    published = LANGUAGE_MODELS["switch-nano-published"].config
    assert decode(encode(published), LanguageConfig, "config.json") == published
    run = override_run(recipe("switch-nano-published"), ["model.plain_router=none"])
    assert run.model.plain_router is None
    run = override_run(run, ["model.plain_router=smoe"])
    assert run.model.plain_router == LINEAR
    with pytest.raises(UserError, match=r"plain_router='smoe'; pass acmoe\.SMoEConfig"):
        replace(published, plain_router="smoe")


def test_it_trains_and_its_checkpoint_gives_the_same_loss(tmp_path: Path) -> None:
    small = ("dim=16", "hidden=16", "heads=2", "block=16", "span=16", "num_experts=4")
    run = override_run(
        recipe("switch-nano-published"),
        [
            *(f"model.{setting}" for setting in small),
            *("steps=3", "batch=2", "warmup=1", "eval_every=3", "checkpoint_every=3"),
            *("eval_tokens=100", "eval_batch=2", "device=cpu"),
            *("data.name=bytes", f"data.folder={byte_corpus(tmp_path)}"),
        ],
    )
    done = train(run, tmp_path / "run", console=QUIET)
    opened = open_run(tmp_path / "run")
    assert (done.step, opened.config) == (3, run)
    model = opened.model()
    assert model.config == run.model
    for layer in model.moe_layers()[2:]:
        # The published gate sets the length of its embeddings to 1.5 before every forward pass.
        length_E = layer.router.base.embedding.norm(dim=1)
        torch.testing.assert_close(length_E, torch.full((4,), 1.5))
    scored = score_stream(model, opened.corpus()["valid"][:100], batch=2, block=16)
    assert value_of(scored.loss, done.metric) == pytest.approx(done.best, abs=1e-6)
