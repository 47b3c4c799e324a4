"""Records of the routers of a transformers model, against the model's own numbers."""

import math

import pytest
import torch
from attached import ids, left_padded, logits, measured
from hf_cases import language_model
from small_models import FAMILIES, build, inputs, is_known
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import acmoe
from acmoe.analyze.analysis import analyze
from acmoe.analyze.hf_text import Batch
from acmoe.analyze.huggingface import sample_model
from acmoe.analyze.record import RoutingRecord
from acmoe.errors import UserError
from acmoe.hf import AcmoeConfig, AcmoeForCausalLM
from acmoe.hf.discovery import find_stacks
from acmoe.hf.observe import observed
from acmoe.hf.parts import attached_parts

TOKENS = ids(batch=3, length=40)


def record(model: nn.Module, *batches: Tensor | dict[str, Tensor], **options) -> RoutingRecord:
    return sample_model(model, batches or [TOKENS], **options).own


@torch.no_grad()
def forced(top_k: int) -> nn.Module:
    """Every router prefers expert 2, then 5: its input is positive in feature 0 for all tokens."""
    config = MixtralConfig(
        **{"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_local_experts": 8},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 3},
        **{"num_experts_per_tok": top_k, "max_position_embeddings": 128},
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    model.model.embed_tokens.weight[:, 0] = 10.0
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()  # the hidden states stay those of the embedding
        if name.endswith("mlp.gate.weight"):
            weight.zero_()
            weight[2, 0], weight[5, 0] = 2.0, 1.0
    return model


def test_all_tokens_at_one_expert() -> None:
    found = analyze(sample_model(forced(1), [TOKENS]), seed=0)
    assert len(found.layers) == 3
    for layer in found.layers:
        assert layer.tokens == 120
        assert layer.load.share == (0, 0, 100, 0, 0, 0, 0, 0)
        assert layer.load.dead == (0, 1, 3, 4, 5, 6, 7)
        # Shares of 100 and seven times 0 about their mean 12.5.
        assert layer.load.std == pytest.approx(math.sqrt((87.5**2 + 7 * 12.5**2) / 8))
        assert layer.load.entropy == 0
    assert [layer.change and layer.change.instability for layer in found.layers] == [None, 0, 0]
    assert found.statistics == "none"


def test_two_experts_share_all_tokens() -> None:
    found = analyze(sample_model(forced(2), [TOKENS]), seed=0)
    for layer in found.layers:
        assert layer.load.share == (0, 0, 50, 0, 0, 50, 0, 0)
        assert layer.load.std == pytest.approx(math.sqrt((2 * 37.5**2 + 6 * 12.5**2) / 8))
        assert layer.load.entropy == 1


def test_scores_ids_and_weights_are_those_of_the_model() -> None:
    model = build("mixtral")
    found = record(model)
    with torch.no_grad():
        output = model(TOKENS, output_router_logits=True, labels=TOKENS)
    assert len(found.layers) == len(output.router_logits)
    for depth, (layer, logits_TE) in enumerate(
        zip(found.layers, output.router_logits, strict=True)
    ):
        top = logits_TE.softmax(-1).topk(2)
        assert torch.equal(layer.affinity, logits_TE)
        assert torch.equal(layer.expert_ids, top.indices)
        torch.testing.assert_close(layer.gate, top.values / top.values.sum(-1, keepdim=True))
        assert torch.equal(layer.first, logits_TE.argmax(-1))
        before = found.layers[depth - 1].first if depth else torch.full((120,), -1)
        assert torch.equal(layer.cluster, before)
        # The router is x W^T.
        router = model.model.layers[depth].mlp.gate
        torch.testing.assert_close(layer.input @ router.weight.T, logits_TE)
    assert torch.equal(found.token_ids, TOKENS.flatten())
    # The model's own loss adds the balancing loss when router logits are asked for.
    with torch.no_grad():
        assert found.loss == pytest.approx(float(model(TOKENS, labels=TOKENS).loss), abs=1e-5)


def test_looking_changes_nothing_and_leaves_nothing() -> None:
    model = measured(statistics="prefix")
    hooks = {
        module: (len(module._forward_pre_hooks), len(module._forward_hooks))
        for module in model.modules()
    }
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = logits(model, input_ids=TOKENS)
    model.train()
    sample_model(model, [TOKENS])
    assert model.training
    model.eval()
    assert torch.equal(logits(model, input_ids=TOKENS), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert hooks == {
        module: (len(module._forward_pre_hooks), len(module._forward_hooks))
        for module in model.modules()
    }
    assert all(
        "cluster_scale" not in vars(p.reader) for p in attached_parts(model).values() if p.reader
    )


@pytest.mark.parametrize("mode", ["running", "prefix"])
def test_the_scale_is_the_one_that_was_used(mode: str) -> None:
    model = measured(statistics=mode)
    stacks = find_stacks(model)
    rows = {found.name: torch.arange(120) for found in stacks[0].routers}
    with torch.no_grad(), observed(stacks, rows, tokens=120) as calls:
        model(TOKENS)
    assert [call.scale is None for call in calls.values()] == [True, False, False, False]
    found = record(model)
    assert [layer.adaptive for layer in found.layers] == [False, True, True, True]
    assert found.statistics == mode
    for layer, call in list(zip(found.layers, calls.values(), strict=True))[1:]:
        torch.testing.assert_close(call.scaled, call.input * call.scale)
        assert torch.equal(layer.scaled, call.scaled)
        assert layer.scale_varies == (mode == "prefix")
        for c in layer.clusters_seen().nonzero()[:, 0].tolist():
            mean_D = call.scale[layer.cluster == c].double().mean(0)
            torch.testing.assert_close(layer.scale[c].double(), mean_D)
        assert float((call.scale - 1).abs().max()) > 0.05


def test_a_blend_is_part_of_the_scale() -> None:
    model = measured(statistics="running")
    # The first adaptive layer reads the same tokens at any blend; later ones read others.
    whole = record(model).layers[1]
    acmoe.hf.set_blend(model, 0.25)
    part = record(model).layers[1]
    torch.testing.assert_close(part.scale, 1 + 0.25 * (whole.scale - 1))


def test_padding_is_not_counted() -> None:
    model = acmoe.attach(build("mixtral"), acmoe.AdaptiveConfig(statistics="batch"), skip=0)
    tokens = ids(batch=2, length=9)
    plain = record(model, tokens)
    padded = record(model, left_padded(tokens, 4))
    assert len(padded.token_ids) == 18
    for one, other in zip(plain.layers, padded.layers, strict=True):
        assert torch.equal(one.expert_ids, other.expert_ids)
        torch.testing.assert_close(one.scaled, other.scaled)
    assert padded.loss == pytest.approx(plain.loss, abs=1e-5)


def test_tokens_that_do_not_count_are_read_all_the_same() -> None:
    model = build("mixtral")
    counted = torch.ones(3, 40, dtype=torch.bool)
    counted[:, 0] = False
    all_tokens, rest = record(model), record(model, Batch({"input_ids": TOKENS}, counted))
    kept = counted.flatten()
    for one, other in zip(all_tokens.layers, rest.layers, strict=True):
        assert torch.equal(one.affinity[kept], other.affinity)
        assert torch.equal(one.input[kept], other.input)
    assert rest.loss == pytest.approx(all_tokens.loss)  # the first token of a row is no target


def test_statistics_can_be_asked_for_and_are_compared() -> None:
    sampled = sample_model(measured(statistics="running"), [TOKENS], statistics="batch")
    assert sampled.own.statistics == "batch"
    assert set(sampled.compared) == {"batch", "running"}
    found = analyze(sampled)
    assert found.gap_loss == sampled.compared["batch"].loss - sampled.compared["running"].loss
    assert found.layers[1].gap is not None
    with pytest.raises(UserError, match="no adaptive router"):
        sample_model(build("mixtral"), [TOKENS], statistics="batch")


def test_inputs_are_kept_of_the_layers_asked_for() -> None:
    found = analyze(sample_model(measured(), [TOKENS], layers=[3]))
    assert [layer.plain is not None for layer in found.layers] == [False, False, True, False]
    assert [layer.scale is not None for layer in found.layers] == [False, False, True, False]
    whole = analyze(sample_model(measured(), [TOKENS]))
    assert found.layers[2] == whole.layers[2]
    assert [layer.load for layer in found.layers] == [layer.load for layer in whole.layers]
    with pytest.raises(UserError, match="layers=5; the model has MoE layers 1 to 4"):
        sample_model(measured(), [TOKENS], layers=[5])


def test_inputs_are_sampled_from_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral")
    whole = record(model)
    monkeypatch.setattr("acmoe.analyze.hf_record.KEPT_TOKENS", 50)
    part = record(model, TOKENS[:2], TOKENS[2:])
    for one, other in zip(whole.layers, part.layers, strict=True):
        assert len(set(other.rows.tolist())) == 50
        assert torch.equal(one.input[other.rows], other.input)
        assert torch.equal(one.affinity, other.affinity)
    assert analyze(sample_model(model, [TOKENS])).layers[0].load.std > 0


def test_a_model_without_a_head_has_no_loss() -> None:
    sampled = sample_model(build("mixtral").model, [TOKENS])
    assert sampled.own.loss is None
    assert analyze(sampled).to_json()["loss"] is None


def test_adaptive_models_of_the_library_are_refused() -> None:
    library = language_model()
    model = AcmoeForCausalLM(AcmoeConfig.of(library.config), library)
    with pytest.raises(UserError, match=r"AcmoeForCausalLM has routers of acmoe .*analyze RUN"):
        sample_model(model, [TOKENS])


def test_two_stacks_are_refused() -> None:
    name = "switch_transformers"
    with pytest.raises(UserError, match="2 stacks of MoE layers"):
        sample_model(build(name), [inputs(name)])


FAST = ("deepseek_v3", "llama4")
PLAIN = [n for n in FAMILIES if n not in ("switch_transformers", "nllb_moe", "diffusion_gemma")]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in PLAIN]
)
def test_every_family_can_be_looked_at(name: str) -> None:
    if not is_known(name):
        pytest.skip(f"{name} is not in this version of transformers")
    given = inputs(name, 2, 12)
    if "input_ids" not in given:
        pytest.skip("it reads the states of another model")
    model = build(name)
    try:
        found = record(model, given)
    except UserError as error:
        assert "cannot be made adaptive" in str(error) or "routers are left out" in str(error)
        return
    for layer in found.layers:
        chosen_NK = layer.affinity.gather(1, layer.expert_ids)
        assert layer.affinity.shape[0] == 24
        assert bool(
            (chosen_NK.amax(-1) == layer.affinity.gather(1, layer.first[:, None])[:, 0]).all()
        )
        assert layer.rows.tolist() == list(range(24))
