"""Attached models, and our own, whose weights accelerate keeps elsewhere between calls."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attached import ids, logits, measured, statistics
from hf_cases import language_model
from small_models import build, inputs
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import acmoe
from acmoe import AdaptiveConfig, UserError
from acmoe.hf import AcmoeConfig, AcmoeForCausalLM

accelerate = pytest.importorskip("accelerate")


def test_an_offloaded_model_is_attached_calibrated_and_generates() -> None:
    model = accelerate.cpu_offload(build("mixtral"), execution_device="cpu")
    acmoe.attach(model, AdaptiveConfig(momentum=0.5))
    acmoe.calibrate(model, [inputs("mixtral", 4, 24, seed=100 + s) for s in range(4)])
    expected = measured()
    assert torch.equal(logits(model, input_ids=ids()), logits(expected, input_ids=ids()))
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids(), **options), expected.generate(ids(), **options))


def test_offloaded_statistics_are_refused() -> None:
    model = accelerate.cpu_offload(measured(), execution_device="cpu", offload_buffers=True)
    with pytest.raises(UserError, match="dispatch with offload_buffers=False"):
        model(ids())


def ours() -> AcmoeForCausalLM:
    model = language_model()
    return AcmoeForCausalLM(AcmoeConfig.of(model.config), model).eval()


# accelerate expects modules, and asks for a place of `positions`, a parameter, all the same.
@pytest.mark.filterwarnings("ignore:The following device_map keys do not match")
def test_blocks_of_our_own_model_are_offloaded(tmp_path: Path) -> None:
    names = ("positions", "embed", "norm", "unembed")
    places = {f"model.{name}": "cpu" for name in names} | {"model.blocks": "disk"}
    options = {"main_device": "cpu", "offload_dir": str(tmp_path), "force_hooks": True}
    model, expected = accelerate.dispatch_model(ours(), places, **options), ours()
    assert model.model.blocks[0].layer.experts.up.is_meta
    torch.testing.assert_close(logits(model, input_ids=ids()), logits(expected, input_ids=ids()))
    given = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids(), **given), expected.generate(ids(), **given))


@pytest.mark.parametrize("buffers", [False, True])
def test_offloaded_tensors_that_nothing_loads_again_are_refused(buffers: bool) -> None:
    """On a CPU torch multiplies by a matrix on the meta device, and returns any numbers."""
    model = accelerate.cpu_offload(ours(), execution_device="cpu", offload_buffers=buffers)
    with pytest.raises(UserError, match=r"offload whole blocks by accelerate\.dispatch_model"):
        model(ids())


def test_accelerate_loads_a_checkpoint_into_an_empty_attached_model(tmp_path: Path) -> None:
    saved = measured()
    saved.save_pretrained(tmp_path, save_original_format=False)
    config = AutoConfig.from_pretrained(tmp_path)

    def loaded(**options: Any) -> nn.Module:
        with accelerate.init_empty_weights():
            empty = AutoModelForCausalLM.from_config(config)
        return accelerate.load_checkpoint_and_dispatch(
            empty, tmp_path, device_map={"": "cpu"}, **options
        ).eval()

    expected = logits(saved, input_ids=ids())
    assert torch.equal(logits(loaded(), input_ids=ids()), expected)
    low = loaded(dtype=torch.bfloat16)
    assert logits(low, input_ids=ids()).dtype == torch.bfloat16
    dtypes = {buffer.dtype for one in statistics(low) for buffer in one.buffers()}
    assert dtypes == {torch.float32}
    low = loaded(dtype=torch.bfloat16)
    with torch.inference_mode():
        low(ids())
    acmoe.calibrate(low, [{"input_ids": ids()}])  # updates them, as training does
    assert not any(buffer.is_inference() for one in statistics(low) for buffer in one.buffers())
