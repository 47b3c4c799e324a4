"""Models that tie the weights of two stacks tie no statistics."""

from pathlib import Path

import pytest
import torch
from attached import logits, measured, statistics
from small_models import inputs, is_known


def test_weights_that_two_stacks_share_leave_their_statistics_apart(tmp_path: Path) -> None:
    if not is_known("diffusion_gemma"):
        pytest.skip("this version of transformers has no DiffusionGemma")
    # DiffusionGemma ties all tensors of its encoder and decoder whose names end with "weight".
    model = measured("diffusion_gemma")
    before = [one.weight.clone() for one in statistics(model)]
    model.resize_token_embeddings(160, mean_resizing=False)  # it ties the weights again
    assert all(torch.equal(a.weight, b) for a, b in zip(statistics(model), before, strict=True))
    places = {one.weight.data_ptr() for one in statistics(model)}
    assert len(places) == len(before)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    given = inputs("diffusion_gemma")
    assert torch.equal(logits(loaded, **given), logits(model, **given))
