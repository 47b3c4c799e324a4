"""Encoder-decoders: their decoder's tokens are made of labels, whose padding must not count."""

from typing import Any

import pytest
import torch
from attached import statistics
from small_models import build, inputs, is_known
from torch import Tensor

import acmoe
from acmoe import AdaptiveConfig
from acmoe.ops import dispatch

NAME = "switch_transformers"
pytestmark = pytest.mark.skipif(not is_known(NAME), reason="transformers has no such model")


def counted(**masks: Tensor) -> list[float]:
    """Return the tokens that a step of three rows of 9 labels, padded to 30, counted per layer of
    the decoder; those alone in their cluster do not count."""
    model: Any = acmoe.attach(build(NAME), AdaptiveConfig(momentum=0.0))
    given = inputs(NAME, 3, 9)
    labels = torch.nn.functional.pad(given["decoder_input_ids"], (0, 21), value=-100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.train()(input_ids=given["input_ids"], labels=labels, **masks).loss.backward()
    optimizer.step()
    return [float(one.weight.sum()) for one in statistics(model.decoder)]


def test_padded_labels_are_not_counted_with_a_mask_and_warned_of_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    mask = torch.zeros(3, 30, dtype=torch.long)
    mask[:, :9] = 1
    assert all(20 <= tokens <= 27 for tokens in counted(decoder_attention_mask=mask))
    warning = "decoder gets no attention mask in training"
    assert warning not in caplog.text
    assert all(80 <= tokens <= 90 for tokens in counted())
    assert warning in caplog.text
    assert "pass the model decoder_attention_mask = (labels != -100)" in caplog.text
