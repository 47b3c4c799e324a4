"""LoRA of PEFT with an attached model: adapters train, statistics move, and files keep both."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from attached import CLOSE, logits, measured, statistics
from hf_cases import language_model
from safetensors.torch import load_file
from small_models import build, inputs
from torch import nn
from transformers import AutoModelForCausalLM

import acmoe
import acmoe.hf
from acmoe import AdaptiveConfig, UserError
from acmoe.hf import AcmoeConfig, AcmoeForCausalLM
from acmoe.ops import dispatch
from slow_cases import mostly_slow

peft = pytest.importorskip("peft", reason="needs peft: pip install peft")

CONFIG = AdaptiveConfig(momentum=0.5)
X = inputs("mixtral", 4, 24)
PLACES = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "router": {"target_parameters": ["mlp.gate.weight"], "target_modules": []},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": []},
}


def lora(**places: Any) -> Any:
    return peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **places)


def attach(model: nn.Module) -> nn.Module:
    return acmoe.attach(model, CONFIG, skip=0)


def adapted(order: str, **places: Any) -> nn.Module:
    """A model with adapters and adaptive routers, put on in the order that is named."""
    model = build("mixtral")
    torch.manual_seed(1)
    if order == "attach, LoRA":
        return peft.get_peft_model(attach(model), lora(**places))
    return attach(peft.get_peft_model(model, lora(**places)))


def train(model: nn.Module, steps: int = 2) -> nn.Module:
    """Train what requires a gradient, which is the adapters."""
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    for _ in range(steps):
        model(**X, labels=X["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@mostly_slow("place", PLACES)
def test_statistics_move_while_adapters_train_in_either_order(place: str) -> None:
    """Two steps of 96 tokens, discounted by momentum 1/2, give 96/2 + 96 = 144 tokens, less those
    of clusters of one token, which carry nothing."""
    first, second = (
        train(adapted(order, **PLACES[place])) for order in ("attach, LoRA", "LoRA, attach")
    )
    for one, other in zip(statistics(first), statistics(second), strict=True):
        assert 132 <= one.weight.sum() <= 144
        assert torch.equal(one.dispersion, other.dispersion)
    assert torch.equal(logits(first, **X), logits(second, **X))
    for model in (first, second):
        assert type(model.get_base_model()).__name__ == "AdaptiveMixtralForCausalLM"
        assert model.config is model.get_base_model().config


@pytest.mark.parametrize("place", ["attention", pytest.param("router", marks=pytest.mark.slow)])
def test_an_adapter_and_its_statistics_are_saved_and_loaded(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PeftModel does both by itself; only a model that is attached afterwards needs a call."""
    model = train(adapted("attach, LoRA", **PLACES[place]))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "acmoe_statistics.safetensors").is_file()
    expected = logits(model, **X)
    loaded = peft.PeftModel.from_pretrained(attach(build("mixtral")), tmp_path)
    assert torch.equal(logits(loaded.eval(), **X), expected)
    assert not caplog.records
    plain = peft.PeftModel.from_pretrained(build("mixtral"), tmp_path)
    assert "trained with adaptive routers, and the model has plain ones" in caplog.text
    loaded = attach(plain).eval()
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.WARNING, logger="acmoe"):
        assert not torch.equal(logits(loaded, **X), expected)
    assert "running statistics that no batch has updated" in caplog.text
    acmoe.hf.load_statistics(loaded, tmp_path)
    assert torch.equal(logits(loaded, **X), expected)
    measure = acmoe.attach(build("mixtral"), AdaptiveConfig(measure="std"))
    with pytest.raises(UserError, match="attach, or build it, with the same measure"):
        peft.PeftModel.from_pretrained(measure, tmp_path)


def test_every_adapter_has_the_statistics_beside_it_and_a_plain_model_none(tmp_path: Path) -> None:
    model = adapted("attach, LoRA", **PLACES["attention"])
    model.add_adapter("other", lora(**PLACES["attention"]))
    model.save_pretrained(tmp_path / "both")
    found = {str(one.parent.name) for one in (tmp_path / "both").rglob("acmoe_statistics.*")}
    assert found == {"both", "other"}
    model.save_pretrained(tmp_path / "one", selected_adapters=["other"])
    assert [*(tmp_path / "one").rglob("acmoe_statistics.*")] == [
        tmp_path / "one" / "other" / "acmoe_statistics.safetensors"
    ]
    model.save_pretrained(tmp_path / "worker", is_main_process=False)
    acmoe.detach(model).save_pretrained(tmp_path / "plain")
    for folder in ("worker", "plain"):
        assert not [*(tmp_path / folder).rglob("acmoe_statistics.*")]


def test_an_adapter_without_statistics_does_not_get_those_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saving it removes them. A program without acmoe does not, and leaves a file that is not of
    the weights beside it."""
    earlier = train(adapted("attach, LoRA", **PLACES["attention"]))
    plain = train(peft.get_peft_model(build("mixtral"), lora(**PLACES["attention"])))
    file = tmp_path / "acmoe_statistics.safetensors"

    earlier.save_pretrained(tmp_path)
    plain.save_pretrained(tmp_path)
    assert not file.exists()

    earlier.save_pretrained(tmp_path)
    type(plain).save_pretrained.__wrapped__(plain, tmp_path)
    assert file.exists()
    peft.PeftModel.from_pretrained(build("mixtral"), tmp_path)
    loaded = peft.PeftModel.from_pretrained(attach(build("mixtral")), tmp_path).eval()
    assert [one.message.count("was saved with another adapter") for one in caplog.records] == [1, 1]
    assert all((one.weight == 0).all() for one in statistics(loaded))
    assert torch.equal(logits(loaded, **X), logits(plain, **X))
    acmoe.hf.load_statistics(loaded, tmp_path)  # a user may say that they belong together
    for one, other in zip(statistics(loaded), statistics(earlier), strict=True):
        assert torch.equal(one.weight, other.weight)


def test_a_plain_model_that_loads_the_adapter_by_transformers_alone_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where AutoModel finds the name of the plain base in the adapter's config."""
    build("mixtral").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft.get_peft_model(attach(base), lora(**PLACES["attention"])).save_pretrained(tmp_path / "one")
    build("mixtral").load_adapter(str(tmp_path / "one"))
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "one")).__name__.startswith("Mix")
    assert caplog.text.count("trained with adaptive routers, and the model has plain ones") == 2


def test_an_adapter_whose_statistics_replace_those_of_another_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, steps in (("none", 0), ("one", 1), ("two", 2)):
        model = train(adapted("attach, LoRA", **PLACES["attention"]), steps)
        model.save_pretrained(tmp_path / name)
    expected = logits(model, **X)
    loaded = peft.PeftModel.from_pretrained(
        attach(build("mixtral")), tmp_path / "two", "two"
    ).eval()
    loaded.load_adapter(tmp_path / "two", "same")
    assert not caplog.records
    loaded.load_adapter(tmp_path / "one", "one")
    assert "now that of adapter 'one', and 'same' and 'two' would be computed" in caplog.text
    assert not torch.equal(logits(loaded, **X), expected)
    loaded.load_adapter(tmp_path / "none", "none")
    assert "now that of adapter 'none', and 'one' and 'same' and 'two' would be" in caplog.text
    acmoe.hf.load_statistics(loaded, tmp_path / "two")
    assert torch.equal(logits(loaded, **X), expected)


def test_prefix_tuning_counts_the_tokens_of_the_batch_alone() -> None:
    """Its three virtual tokens are keys and values in a cache, which the mask covers too. One step
    of 4 sequences of 24 tokens, of which 2 begin with 5 of padding: 86 tokens."""
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    mask = torch.ones_like(X["input_ids"])
    mask[:2, :5] = 0
    model = peft.get_peft_model(attach(build("mixtral")), config).train()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    model(**X, attention_mask=mask, labels=X["input_ids"]).loss.backward()
    optimizer.step()
    assert all(82 <= one.weight.sum() <= 86 for one in statistics(model))
    prefix = acmoe.attach(build("mixtral"), AdaptiveConfig(statistics="prefix"))
    with pytest.raises(
        UserError, match=r"past_key_values holds 3 tokens, .* use statistics='running'"
    ):
        peft.get_peft_model(prefix, config).train()(**X)


def test_peft_may_be_imported_after_the_model_was_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its methods are then wrapped when it puts the adapters on."""
    model, other = attach(build("mixtral")), attach(build("mixtral"))
    for name in ("save_pretrained", "load_adapter"):
        monkeypatch.setattr(peft.PeftModel, name, getattr(peft.PeftModel, name).__wrapped__)
    peft.get_peft_model(model, lora(**PLACES["attention"])).save_pretrained(tmp_path)
    assert (tmp_path / "acmoe_statistics.safetensors").is_file()
    for name in ("save_pretrained", "load_adapter"):
        monkeypatch.setattr(peft.PeftModel, name, getattr(peft.PeftModel, name).__wrapped__)
    for one in statistics(other):
        one.weight.fill_(7)
    peft.PeftModel.from_pretrained(other, tmp_path)
    assert all((one.weight == 0).all() for one in statistics(other))


def test_a_merged_model_is_saved_whole(tmp_path: Path) -> None:
    model = train(adapted("LoRA, attach", **PLACES["attention"]))
    expected = logits(model, **X)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged, **X), expected, **CLOSE)
    merged.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(logits(loaded, **X), logits(merged, **X))


def test_an_adapter_of_transformers_itself_is_saved_with_the_statistics(tmp_path: Path) -> None:
    model = measured()
    torch.manual_seed(1)
    model.add_adapter(lora(**PLACES["attention"]))
    expected = logits(train(model), **X)
    model.save_pretrained(tmp_path)
    loaded = attach(build("mixtral"))
    loaded.load_adapter(str(tmp_path))
    assert torch.equal(logits(loaded.eval(), **X), expected)
    by_tensors = attach(build("mixtral"))
    by_tensors.load_adapter(
        peft_config=lora(**PLACES["attention"]),
        adapter_state_dict=load_file(tmp_path / "adapter_model.safetensors"),
    )
    acmoe.hf.load_statistics(by_tensors, tmp_path)
    assert torch.equal(logits(by_tensors.eval(), **X), expected)


def test_old_names_of_experts_are_translated_as_for_the_plain_model() -> None:
    """PEFT knows by the model type that w1 and w3 are fused in transformers 5."""
    with pytest.warns(RuntimeWarning, match="did not match any targeted module"):
        model = adapted("attach, LoRA", target_modules=["q_proj", "w1", "w2", "w3"])
    names = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert sum("experts" in name for name in names) == 8  # two weights in four layers


def test_a_router_that_peft_copies_is_refused() -> None:
    copied = {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}
    with pytest.raises(UserError, match="name the router's weight in target_parameters"):
        adapted("LoRA, attach", **copied)
    with pytest.raises(UserError, match=r"it is a copy \(modules_to_save of PEFT\)"):
        adapted("attach, LoRA", **copied)(**X)


ROUTERS = ["router.embedding", "router.base.embedding"]


@pytest.mark.parametrize("places", [{}, {"target_parameters": ROUTERS}], ids=["query", "router"])
def test_adapters_of_our_own_model_are_saved_with_its_statistics(
    places: dict[str, Any], tmp_path: Path
) -> None:
    tokens = X["input_ids"] % 64

    def ours() -> nn.Module:
        torch.manual_seed(0)
        model = language_model()
        return AcmoeForCausalLM(AcmoeConfig.of(model.config), model)

    model = peft.get_peft_model(ours(), lora(target_modules=["query"], **places)).train()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all((p.grad != 0).any() for p in model.parameters() if p.requires_grad)
    optimizer.step()
    expected = logits(model.eval(), input_ids=tokens)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(ours(), tmp_path).eval()
    assert torch.equal(logits(loaded, input_ids=tokens), expected)
    with pytest.raises(UserError, match="output_attentions=True is not supported"):
        loaded(input_ids=tokens, output_attentions=True)
    assert len(loaded(input_ids=tokens, output_hidden_states=True).hidden_states) > 1
    with pytest.raises(UserError, match=r"inputs_embeds=\(1, 2, 3\) .* pass input_ids"):
        ours()(None, inputs_embeds=torch.zeros(1, 2, 3))
