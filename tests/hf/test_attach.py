"""Changes that `acmoe.attach` makes in a model of transformers, and parts it leaves alone."""

import copy
import sys
import threading
from dataclasses import fields
from typing import Any

import pytest
import torch
from attached import CLOSE, ids, left_padded, logits, measured, statistics
from hf_cases import language_model
from small_models import build, inputs
from torch import Tensor, nn

import acmoe
from acmoe import AdaptiveConfig, RoutingState, UserError
from acmoe.hf import AcmoeConfig, AcmoeForCausalLM
from acmoe.hf.adaptive import AdaptivePart, first_choice, state_on
from acmoe.hf.parts import attached_parts
from acmoe.lab.variants import VariantConfig


def test_a_fresh_attach_changes_no_bit_and_detach_takes_everything_off() -> None:
    model, tokens = build("mixtral"), inputs("mixtral")
    plain, keys = logits(model, **tokens), list(model.state_dict())
    assert acmoe.attach(model) is model
    assert torch.equal(logits(model, **tokens), plain)
    acmoe.calibrate(model, [ids(4, 24)])
    assert not torch.equal(logits(model, **tokens), plain)
    assert len(model(**tokens, output_router_logits=True).router_logits) == 4
    assert acmoe.detach(model) is model
    assert torch.equal(logits(model, **tokens), plain)
    assert list(model.state_dict()) == keys
    assert not hasattr(model.config, "acmoe")
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_router_reads_the_scaled_token_and_its_experts_the_token_itself() -> None:
    """Checked by a float64 loop over tokens: M = 1/s over its mean, of the last first choice."""
    model = acmoe.attach(build("mixtral"))
    parts = list(attached_parts(model).values())
    generator = torch.Generator().manual_seed(0)
    for part in parts[:-1]:
        spread = part.statistics.dispersion
        spread.copy_(torch.rand(spread.shape, generator=generator) + 0.5)
        part.statistics.weight.fill_(100.0)
    read: dict[int, Tensor] = {}
    choices: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}
    for depth, layer in enumerate(model.model.layers):
        block = layer.mlp

        def before(m: nn.Module, args: Any, depth: int = depth) -> None:
            read[depth] = args[0].double()

        def after(m: nn.Module, args: Any, output: Any, depth: int = depth) -> None:
            choices[depth] = output[0].argmax(-1)

        def experts(m: nn.Module, args: Any, depth: int = depth) -> None:
            given[depth] = args[0].double()

        block.gate.register_forward_pre_hook(before)
        block.gate.register_forward_hook(after)
        block.experts.register_forward_pre_hook(experts)
    logits(model, input_ids=ids())
    assert torch.equal(read[0], given[0])
    for depth in (1, 2, 3):
        spread_CD = parts[depth - 1].statistics.dispersion.double()
        for token in range(20):
            weight_D = 1 / spread_CD[choices[depth - 1][token]]
            expected_D = given[depth][token] * weight_D / weight_D.mean()
            torch.testing.assert_close(read[depth][token], expected_D, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", ["running", "prefix"])
def test_no_token_sees_a_later_token_or_another_sequence(mode: str) -> None:
    model, tokens = measured(statistics=mode), ids(3, 12)
    whole = logits(model, input_ids=tokens)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 7) % 90 + 3
    torch.testing.assert_close(logits(model, input_ids=other)[:, :-1], whole[:, :-1], **CLOSE)
    torch.testing.assert_close(logits(model, input_ids=tokens[:1]), whole[:1], **CLOSE)


@pytest.mark.parametrize("mode", ["running", "prefix"])
def test_left_padding_changes_nothing_and_is_not_counted(mode: str) -> None:
    model, tokens = measured(statistics=mode), ids()
    padded = left_padded(tokens, 4)
    bare = logits(model, input_ids=tokens)
    torch.testing.assert_close(logits(model, **padded)[:, 4:], bare, **CLOSE)
    counts, spreads = [], []
    for arguments in ({"input_ids": tokens}, padded):
        model.train()(**arguments)
        counts.append([one.last_count.clone() for one in statistics(model)])
        spreads.append([one.last_dispersion.clone() for one in statistics(model)])
        for one in statistics(model):
            one.last_count.zero_()
    assert all(count.sum() > 10 for count in counts[0])  # clusters of one token do not count
    torch.testing.assert_close(counts[0], counts[1], atol=0, rtol=0)
    torch.testing.assert_close(spreads[0], spreads[1], **CLOSE)


def test_masks_that_do_not_tell_padding_are_refused_where_it_matters() -> None:
    tokens = ids(2, 6)
    causal = torch.ones(2, 1, 6, 6).tril().bool()
    model = measured()
    logits(model, input_ids=tokens, attention_mask=causal)  # running, eval: no token mask needed
    with pytest.raises(UserError, match=r"attention_mask is \(2, 1, 6, 6\)"):
        model.train()(input_ids=tokens, attention_mask=causal)
    prefix = measured(statistics="prefix")
    with pytest.raises(UserError, match="pass a 2-D mask"):
        prefix(input_ids=tokens, attention_mask=causal)
    for row in ([0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]):  # the second: one token, then five
        packed = torch.tensor([row, row])
        logits(model.eval(), input_ids=tokens, position_ids=packed)
        with pytest.raises(UserError, match="packed into one row"):
            prefix(input_ids=tokens, position_ids=packed)


def test_the_first_choice_is_the_best_among_the_chosen_on_this_rank() -> None:
    scores = torch.tensor([[9.0, 1, 2, 3], [1, 5, 5, 0], [4, 3, 2, 1], [0, 0, 7, 0]])
    chosen = torch.tensor([[1, 3], [2, 1], [4, 2], [4, 4]])  # 4: an expert of another rank
    assert first_choice(scores, chosen).tolist() == [3, 1, 2, 2]
    assert first_choice(scores, None).tolist() == [0, 1, 0, 2]


def test_a_state_moves_to_the_device_of_its_router() -> None:
    state = RoutingState.identity(num_tokens=3, num_clusters=4, dim=8)
    moved = state_on(state, torch.empty(3, 8, device="meta"))
    assert [tensor.device.type for tensor in moved] == ["meta"] * 6
    assert state_on(state, torch.empty(3, 8)) is state


def test_low_precision_is_cast_back_for_the_router() -> None:
    model, tokens = build("mixtral").to(torch.bfloat16), ids(1, 4)
    plain = logits(model, input_ids=tokens)
    acmoe.attach(model)
    assert torch.equal(logits(model, input_ids=tokens), plain)
    acmoe.calibrate(model, [ids(2, 6)])
    assert logits(model, input_ids=tokens).dtype == torch.bfloat16
    assert {one.dispersion.dtype for one in statistics(model)} == {torch.float32}


def test_threads_share_a_model_and_a_copy_is_a_model_of_its_own() -> None:
    model = measured()
    tokens = [ids(2, 8, seed) for seed in (0, 1)]
    expected = [logits(model, input_ids=one) for one in tokens]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(5):
            if not torch.allclose(logits(model, input_ids=tokens[index]), expected[index], **CLOSE):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    twin = copy.deepcopy(model)
    acmoe.detach(model)
    assert torch.equal(logits(twin, input_ids=tokens[0]), expected[0])
    assert len(attached_parts(acmoe.attach(model))) == 4
    assert not attached_parts(acmoe.detach(twin))


def test_a_router_that_is_not_called_is_noticed() -> None:
    model = measured()
    model.model.layers[2].mlp.forward = lambda hidden_states: hidden_states
    with pytest.raises(UserError, match=r"3 of 4 routers were called, not model.layers.2.mlp.gate"):
        logits(model, input_ids=ids())
    with pytest.raises(UserError, match="without the record of its model's call"):
        model.model.layers[1](torch.zeros(1, 3, 32))
    with pytest.raises(UserError, match="outside of its decoder layer"):
        model.model.layers[1].mlp.gate(torch.zeros(3, 32))


def test_layers_in_another_order_than_at_the_attach_are_refused() -> None:
    model = measured()
    model.model.layers = nn.ModuleList([model.model.layers[i] for i in (0, 2, 1, 3)])
    with pytest.raises(UserError, match=r"layers.1.mlp.gate was called after .* attach again"):
        logits(model, input_ids=ids())
    acmoe.attach(acmoe.detach(model))
    assert logits(model, input_ids=ids()).isfinite().all()


def test_one_module_in_two_places_is_refused() -> None:
    model = build("mixtral")
    model.model.layers[2] = model.model.layers[1]
    acmoe.attach(model)
    with pytest.raises(UserError, match=r"layers.1.mlp.gate was called twice .* copy.deepcopy"):
        model(ids(1, 6))


@pytest.mark.slow
def test_one_module_in_two_places_is_refused_in_compiled_code_too() -> None:
    model = build("mixtral")
    model.model.layers = nn.ModuleList([model.model.layers[0]] * 2 + [model.model.layers[1]])
    model.config.num_hidden_layers = 3
    acmoe.attach(model)
    torch.compiler.reset()
    with pytest.raises(UserError, match=r"layers.0.mlp.gate was called twice"):
        logits(torch.compile(model, backend="eager"), input_ids=ids(1, 6))


def test_a_plain_router_may_be_in_two_places() -> None:
    model = build("mixtral")
    model.model.layers[1] = model.model.layers[0]
    plain = logits(model, input_ids=ids())
    acmoe.attach(model, skip=2)  # of three routers the last is adaptive, and reads from the second
    assert torch.equal(logits(model, input_ids=ids()), plain)


def test_data_parallel_copies_are_refused() -> None:
    model = measured()
    model.model._is_replica = True  # as nn.parallel.replicate marks its copies
    with pytest.raises(UserError, match=r"nn\.DataParallel"):
        model(input_ids=ids())
    with pytest.raises(UserError, match=r"nn\.DataParallel"):
        acmoe.attach(nn.DataParallel(build("mixtral")))


def test_placement() -> None:
    def depths(**options: Any) -> list[tuple[int, bool]]:
        parts = attached_parts(acmoe.attach(build("mixtral"), **options)).values()
        return [(part.depth, part.reader is not None) for part in parts]

    assert depths() == depths(skip=0) == [(0, False), (1, True), (2, True), (3, True)]
    assert depths(skip=2) == [(1, False), (2, True), (3, True)]  # the paper's Skip 1
    assert depths(skip=3) == [(2, False), (3, True)]
    assert depths(layers=[1, 3]) == [(0, False), (1, True), (2, False), (3, True)]
    model = acmoe.attach(build("mixtral"), AdaptiveConfig(clamp=3.0), layers=[2])
    saved = model.config.acmoe
    assert (saved["layers"], saved["skip"], saved["blend_steps"]) == ([2], 1, 0)
    assert set(saved["router"]) == {one.name for one in fields(AdaptiveConfig)} - {"base"}
    assert AdaptiveConfig(**saved["router"]) == AdaptiveConfig(clamp=3.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skip": 4}, "skip=4 leaves no adaptive router among 4 MoE layers"),
        ({"skip": -1}, "skip=-1; it must be a whole number"),
        ({"skip": 2, "layers": [1]}, r"skip=2 has no effect with layers=\[1\]"),
        ({"skip": 1.5}, "skip=1.5; it must be a whole number"),
        ({"layers": []}, r"layers=\[\] leaves no adaptive router"),
        ({"layers": [0]}, "layers holds depth 0; among 4 MoE layers"),
        ({"layers": [4]}, "layers holds depth 4; among 4 MoE layers"),
        ({"layers": "all"}, "layers='all'; pass a list"),
        ({"blend_steps": -1}, "blend_steps=-1; it must be a whole number"),
        ({"config": "smoe"}, "config='smoe' cannot be attached"),
        ({"config": acmoe.RandomConfig()}, "config=RandomConfig cannot be attached"),
        ({"config": VariantConfig(power=0.5)}, "config=VariantConfig cannot be attached"),
        ({"config": AdaptiveConfig(scale_experts=True)}, "scale_experts=True needs"),
        ({"config": AdaptiveConfig(base=acmoe.CosineConfig())}, "base=CosineConfig"),
        ({"config": AdaptiveConfig(mix=9)}, "mix=9 exceeds num_experts=8"),
    ],
)
def test_bad_values_are_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    model = build("mixtral")
    with pytest.raises(UserError, match=message) as error:
        acmoe.attach(model, **arguments)
    assert "\n" not in str(error.value)
    assert not hasattr(model.config, "acmoe")
    assert not any(isinstance(module, AdaptivePart) for module in model.modules())


def test_what_cannot_be_attached_or_detached_is_refused() -> None:
    model = acmoe.attach(build("mixtral"))
    for again in (model, model.model):
        with pytest.raises(UserError, match="attached already"):
            acmoe.attach(again)
    with pytest.raises(UserError, match="has no attached router"):
        acmoe.detach(build("mixtral"))
    with pytest.raises(UserError, match="compiled already"):
        acmoe.attach(torch.compile(build("mixtral")))
    with pytest.raises(UserError, match="model is a str"):
        acmoe.attach("mixtral")
    ours = language_model()
    ours = AcmoeForCausalLM(AcmoeConfig.of(ours.config), ours)
    with pytest.raises(UserError, match="build the model with router='adaptive' instead"):
        acmoe.attach(ours)
    with pytest.raises(
        UserError, match="is a model of acmoe, whose statistics are updated in training"
    ):
        acmoe.calibrate(ours, [ids()])


def test_attach_reads_no_weight_so_that_it_can_run_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = acmoe.attach(build_on_meta())
    assert all(one.dispersion.is_meta for one in statistics(model))


def build_on_meta() -> nn.Module:
    from small_models import FAMILIES, config
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config(FAMILIES["mixtral"]))


def test_without_transformers_the_names_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "acmoe.hf", None)
    with pytest.raises(UserError, match=r"needs transformers 5\.17 or later.*acmoe\[hf\]"):
        acmoe.attach  # noqa: B018
    assert {"attach", "calibrate", "detach"} <= set(dir(acmoe))
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        acmoe.atach  # noqa: B018
