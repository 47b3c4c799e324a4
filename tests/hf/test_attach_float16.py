"""Rescaled tokens in float16, whose range ends at 65504."""

import torch
from attached import ids, logits, measured, statistics
from torch import Tensor

from acmoe.hf.adaptive import narrowed


def test_a_row_beyond_the_range_keeps_its_direction_and_others_every_bit() -> None:
    x = torch.tensor([[1.0, -131008.0, 655.04], [0.1, 65504.0, -3.0], [0.0, 0.0, 0.0]])
    # The first row is twice too large: halved, it is (0.5, -65504, 327.52).
    assert torch.equal(
        narrowed(x, torch.float16),
        torch.tensor([[0.5, -65504.0, 327.52], [0.1, 65504.0, -3.0], [0.0, 0.0, 0.0]]).half(),
    )
    assert torch.equal(narrowed(x, torch.bfloat16), x.to(torch.bfloat16))


@torch.no_grad()
def test_routers_stay_finite_where_those_of_the_plain_model_are() -> None:
    """On one feature the clusters have no spread: M is 31.1 there, of 32 features."""
    model, tokens = measured().half(), ids()
    largest: list[Tensor] = []
    for one in statistics(model):
        one.dispersion.fill_(1.0)
        one.dispersion[:, 3] = 0.0
        one.weight.fill_(100.0)
    for layer in model.model.layers:
        layer.mlp.gate.weight.mul_(0.01)
        layer.mlp.experts.gate_up_proj.mul_(1e-3)
        layer.post_attention_layernorm.weight.fill_(1500.0)
        layer.mlp.gate.register_forward_pre_hook(
            lambda router, args: largest.append(args[0].float().abs().amax())
        )
    assert torch.isfinite(logits(model, input_ids=tokens)).all()
    assert max(largest) == 65504.0
