"""An attached model is saved and loaded by transformers' own functions, and stays what it was."""

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from attached import logits, measured, statistics
from safetensors.torch import load_file, save_file
from small_models import FAMILIES, build, inputs, is_known
from test_discovery import LOGITS_SINCE_5_22, VERSION
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import acmoe
import acmoe.hf
from acmoe import AdaptiveConfig, UserError
from acmoe.hf.checkpoints import auto, classes

REFUSED = {"doge"}  # it has no router module


def loader(name: str, model: nn.Module) -> type:
    """The class that loads a model of a family: an Auto class where one knows it."""
    kind = FAMILIES[name].model
    return getattr(transformers, kind) if kind.startswith("Auto") else type(model)


def assert_round_trip(name: str, path: Path, **save: object) -> nn.Module:
    model = measured(name)
    model.save_pretrained(path, **save)
    loaded, report = loader(name, model).from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded) is type(model)
    assert type(loaded.config) is type(model.config)
    assert loaded.config.acmoe == model.config.acmoe
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert torch.equal(logits(loaded, **inputs(name)), logits(model, **inputs(name)))
    return loaded


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_loaded_model_is_bitwise_the_saved_one(name: str, tmp_path: Path) -> None:
    assert_round_trip(name, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"acmoe_{name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - REFUSED))
def test_every_family_is_loaded_bitwise(name: str, tmp_path: Path) -> None:
    if not is_known(name) or (name in LOGITS_SINCE_5_22 and VERSION < (5, 22)):
        pytest.skip(f"transformers {transformers.__version__} gives no logits of {name}")
    assert_round_trip(name, tmp_path)


def test_shards_are_loaded_bitwise(tmp_path: Path) -> None:
    assert_round_trip("mixtral", tmp_path, max_shard_size="100KB")
    assert len([*tmp_path.glob("model-*-of-*.safetensors")]) > 1


def test_the_class_is_a_subclass_and_detach_gives_back_the_plain_one(tmp_path: Path) -> None:
    plain = build("mixtral")
    expected = logits(plain, **inputs("mixtral"))
    model = assert_round_trip("mixtral", tmp_path)
    assert type(model).__name__ == "AdaptiveMixtralForCausalLM"
    assert type(model) is acmoe.hf.AdaptiveMixtralForCausalLM
    assert isinstance(model, transformers.MixtralForCausalLM)
    assert isinstance(model.config, transformers.MixtralConfig)
    acmoe.detach(model)
    assert type(model) is transformers.MixtralForCausalLM
    assert type(model.config) is transformers.MixtralConfig
    assert not hasattr(model.config, "acmoe")
    assert torch.equal(logits(model, **inputs("mixtral")), expected)
    model.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is transformers.MixtralForCausalLM


def test_a_copy_has_the_class_and_the_statistics() -> None:
    model = measured()
    other = copy.deepcopy(model)
    assert type(other) is type(model)
    assert torch.equal(logits(other, **inputs("mixtral")), logits(model, **inputs("mixtral")))


def test_a_config_that_two_models_share_stays_plain_for_the_other() -> None:
    first = build("mixtral")
    second = transformers.MixtralForCausalLM(first.config)
    acmoe.attach(first)
    assert type(second.config) is transformers.MixtralConfig
    assert not hasattr(second.config, "acmoe")
    configs = (getattr(module, "config", None) for module in first.modules())
    own = {id(one) for one in configs if isinstance(one, transformers.MixtralConfig)}
    assert len(own) == 1 and id(second.config) not in own


def test_statistics_stay_float32_in_another_dtype(tmp_path: Path) -> None:
    model = measured()
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert loaded.model.layers[0].mlp.gate.weight.dtype == dtype
        for before, after in zip(statistics(model), statistics(loaded), strict=True):
            assert {buffer.dtype for buffer in after.buffers()} == {torch.float32}
            assert torch.equal(after.dispersion, before.dispersion)
    new = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    assert {b.dtype for one in statistics(new) for b in one.buffers()} == {torch.float32}


def test_all_options_are_in_the_file(tmp_path: Path) -> None:
    """A default that changes later does not change an old model."""
    model = acmoe.attach(build("mixtral"), AdaptiveConfig(momentum=0.5), layers=[2], blend_steps=4)
    acmoe.hf.set_blend(model, 0.75)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["acmoe"]
    names = {one.name for one in dataclasses.fields(AdaptiveConfig)} - {"base"}
    assert stored["router"].keys() == names
    assert (stored["layers"], stored["blend_steps"], stored["format"]) == ([2], 4, 1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    blend = loaded.model.layers[2].mlp.gate.adaptive.blend
    assert (blend.value.item(), blend.steps) == (0.75, 4)
    assert statistics(loaded)[0].config == AdaptiveConfig(momentum=0.5)


def test_statistics_that_a_file_lacks_are_empty(tmp_path: Path) -> None:
    measured().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if ".adaptive." not in key}
    save_file(kept, file, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for one in statistics(loaded):
        buffers = dict(one.named_buffers())
        assert torch.equal(buffers.pop("running_scale"), torch.ones_like(one.dispersion))
        assert all(not buffer.any() for buffer in buffers.values())
    assert loaded.model.layers[1].mlp.gate.adaptive.blend.value == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "acmoe.format is 2 in this config, and this version of acmoe reads up to"),
        ({"format": None}, "acmoe.format is None"),
        ({"future": 1}, "acmoe.future in this config is unknown; upgrade acmoe"),
        ({"router": None}, "acmoe.router is None in this config, which is damaged"),
        ({"router": {"future": 1}}, "acmoe.future in this config is unknown; upgrade acmoe"),
    ],
)
def test_options_of_a_newer_version_are_refused(change: dict, message: str, tmp_path: Path) -> None:
    config = acmoe.attach(build("mixtral")).config
    config.acmoe = config.acmoe | change
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert "\n" not in str(error.value)


def test_an_adaptive_class_needs_the_options() -> None:
    with pytest.raises(UserError, match=r"MixtralConfig has no field 'acmoe'; build or load"):
        acmoe.hf.AdaptiveMixtralForCausalLM(transformers.MixtralConfig())


def test_the_files_of_remote_code_are_not_named() -> None:
    """`auto_map` names the plain classes, and transformers would load those."""
    model = build("mixtral")
    model.config.auto_map = {"AutoConfig": "code.Config"}
    assert "auto_map" not in acmoe.attach(model).config.to_dict()
    assert acmoe.detach(model).config.to_dict()["auto_map"] == {"AutoConfig": "code.Config"}


def test_a_new_process_knows_the_model_types(tmp_path: Path, monkeypatch) -> None:
    """Here: as after `import acmoe.hf` and no attach; a slow test below starts a process."""
    model = measured()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(classes, "_CONFIGS", {})
    monkeypatch.setattr(classes, "_MODELS", {})
    known = auto.AdaptiveTypes({}, classes.adaptive_config_class)
    monkeypatch.setattr(auto.CONFIGS, "_extra_content", known)
    assert "acmoe_mixtral" in auto.CONFIGS
    assert "acmoe_unheard_of" not in auto.CONFIGS
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "AdaptiveMixtralForCausalLM"
    assert torch.equal(logits(loaded, **inputs("mixtral")), logits(model, **inputs("mixtral")))


PROCESS = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "acmoe":
            raise ModuleNotFoundError(name)
block = Block()
sys.meta_path.insert(0, block)
import torch
from transformers import AutoModelForCausalLM
path = sys.argv[1]
try:
    AutoModelForCausalLM.from_pretrained(path)
except ValueError as error:
    assert "acmoe_mixtral" in str(error)
else:
    raise AssertionError("transformers alone has loaded the plain model")
sys.meta_path.remove(block)
import acmoe.hf
assert "transformers.models.mixtral.modeling_mixtral" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(path)
with torch.no_grad():
    torch.save(model(torch.load(path + "/ids")).logits, path + "/logits")
"""


@pytest.mark.slow
def test_another_process_loads_it_with_acmoe_and_refuses_it_without(tmp_path: Path) -> None:
    model, tokens = measured(), inputs("mixtral")["input_ids"]
    model.save_pretrained(tmp_path)
    torch.save(tokens, tmp_path / "ids")
    subprocess.run([sys.executable, "-c", PROCESS, str(tmp_path)], check=True)
    assert torch.equal(torch.load(tmp_path / "logits"), logits(model, input_ids=tokens))


def test_other_auto_classes_load_it(tmp_path: Path) -> None:
    model = measured()
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body).__name__ == "AdaptiveMixtralModel"
    x = inputs("mixtral")
    with torch.no_grad():
        assert torch.equal(model.lm_head(body(**x).last_hidden_state), model(**x).logits)
        assert len(body(**x, output_router_logits=True).router_logits) == 4


def test_a_head_that_builds_its_body_by_an_auto_class_is_loaded(tmp_path: Path) -> None:
    config = build("mixtral").config
    model = acmoe.attach(AutoModelForSequenceClassification.from_config(config).eval())
    assert type(model.model) is transformers.MixtralModel
    acmoe.calibrate(model, [inputs("mixtral", 4, 24)["input_ids"]])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "AdaptiveMixtralForSequenceClassification"
    assert type(loaded.model) is transformers.MixtralModel
    assert torch.equal(logits(loaded, **inputs("mixtral")), logits(model, **inputs("mixtral")))


def test_the_tokenizer_beside_it_is_loaded(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"route": 0, "the": 1, "token": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    acmoe.attach(build("mixtral")).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("route the token")["input_ids"] == [0, 1, 2]


def test_an_attached_body_records_its_router_logits() -> None:
    model = build("mixtral").model
    assert (
        len(acmoe.attach(model)(**inputs("mixtral"), output_router_logits=True).router_logits) == 4
    )


def test_trainer_knows_the_class_as_a_causal_language_model() -> None:
    """Label smoothing shifts the labels of the classes that this table names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model = acmoe.attach(build("mixtral"))
    assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert model.can_generate()


def test_the_config_class_reads_a_plain_checkpoint_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT does so when it saves an adapter. No model can be built without the options."""
    build("mixtral").save_pretrained(tmp_path)
    warned: list[str] = []
    monkeypatch.setattr(transformers.configuration_utils.logger, "warning", warned.append)
    config = acmoe.hf.AdaptiveMixtralConfig.from_pretrained(tmp_path)
    assert config.model_type == "acmoe_mixtral" and not warned
    with pytest.raises(UserError, match="has no field 'acmoe'"):
        acmoe.hf.AdaptiveMixtralForCausalLM.from_pretrained(tmp_path)
