"""Our models built without values, on the meta device, and filled afterwards."""

import pytest
import torch
from hf_cases import language_model, same_state

import acmoe
from slow_cases import mostly_slow

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM  # noqa: E402, after importorskip

from acmoe.hf import AcmoeConfig, AcmoeForCausalLM  # noqa: E402

IDS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))
MODES = ["running", "prefix", "batch", "sequence"]


def ours(statistics="running"):
    model = language_model(acmoe.AdaptiveConfig(statistics=statistics))
    return AcmoeForCausalLM(AcmoeConfig.of(model.config), model).eval()


def test_a_model_on_the_meta_device_tells_shapes_and_takes_weights():
    model = ours()
    with torch.device("meta"):
        empty = AcmoeForCausalLM(model.config).eval()
    mask = torch.ones_like(IDS, device="meta")
    positions = torch.arange(12, device="meta")[None]
    found = empty(IDS.to("meta"), attention_mask=mask, position_ids=positions)
    assert found.logits.is_meta and found.logits.shape == (2, 12, 256)
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(IDS).logits, model(IDS).logits)


@mostly_slow("statistics", MODES)
def test_a_training_step_on_the_meta_device_tells_the_shapes_of_loss_and_gradients(statistics):
    with torch.device("meta"):
        empty = AcmoeForCausalLM(ours(statistics).config).train()
    ids = IDS.to("meta")
    found = empty(ids, labels=ids)
    assert found.loss.is_meta and found.loss.shape == () and found.loss.dtype == torch.float32
    found.loss.backward()
    assert all(one.grad.shape == one.shape for one in empty.parameters() if one.grad is not None)
    assert empty.model.unembed.weight.grad is not None
    scored = empty.eval()(ids, labels=ids, attention_mask=torch.ones_like(ids))
    assert scored.loss.is_meta and scored.logits.shape == (2, 12, 256)


@mostly_slow(
    ("statistics", "buffers"),
    [(mode, buffers) for mode in MODES for buffers in (False, True)],
    keep={2 * n + n % 2 for n in range(len(MODES))},  # each mode, in one of both ways
)
def test_a_model_of_init_empty_weights_takes_a_state_dict(statistics, buffers):
    model = ours(statistics)
    with accelerate.init_empty_weights(include_buffers=buffers):
        empty = AutoModelForCausalLM.from_config(model.config).eval()
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert all(buffer.is_meta == buffers for buffer in empty.buffers())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert not any(buffer.is_meta for buffer in empty.buffers())
    assert same_state(empty, model)
    assert torch.equal(empty(IDS).logits, model(IDS).logits)


def test_an_empty_model_is_filled_from_a_folder_by_accelerate(tmp_path):
    model = ours()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    with accelerate.init_empty_weights():
        empty = AcmoeForCausalLM(model.config).eval()
    filled = accelerate.load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"})
    assert same_state(filled, model)
    assert torch.equal(filled(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("options", [{}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}])
def test_half_precision_keeps_float32_statistics_however_it_is_loaded(options, tmp_path):
    model = ours()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **options)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    expected = model.state_dict()
    statistics = {key: v for key, v in loaded.state_dict().items() if "statistics" in key}
    assert statistics
    for key, value in statistics.items():
        assert value.dtype == torch.float32 and torch.equal(value, expected[key])
