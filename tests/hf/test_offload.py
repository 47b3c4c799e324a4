"""Attached models whose weights accelerate keeps elsewhere between calls."""

import pytest
import torch
from attached import ids, logits, measured
from small_models import build, inputs

import acmoe
from acmoe import AdaptiveConfig, UserError

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
