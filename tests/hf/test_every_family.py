"""A training step, bfloat16 and our experts on a tiny model of every family of transformers."""

from typing import Any

import pytest
import torch
from attached import logits, measured, statistics
from small_models import build, inputs
from test_attach_families import EVERY
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import acmoe
from acmoe import AdaptiveConfig
from acmoe.hf.experts import experts_forward

pytestmark = pytest.mark.slow

# Their experts are their own: transformers passes no implementation on to them.
OWN_EXPERTS = ("dbrx", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "step3p7")
OWN_EXPERTS += ("switch_transformers",)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "layerdrop"):  # attached models refuse it in training
            module.layerdrop = 0.0
    return model


def gradients(model: nn.Module, call: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the mean square of the outputs, in training mode."""
    model.zero_grad()
    torch.manual_seed(0)
    output = model.train()(**call)
    found = output["logits"] if "logits" in output else output["last_hidden_state"]
    found.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", EVERY)
def test_a_step_moves_the_statistics_and_checkpointing_changes_no_gradient(name: str) -> None:
    model: Any = acmoe.attach(without_dropout(build(name)), AdaptiveConfig(momentum=0.5))
    call = inputs(name, 4, 24, seed=3)
    plain = gradients(model, call)
    assert all(gradient.isfinite().all() for gradient in plain.values())
    assert any("gate" in key or "router" in key for key in plain)
    if model.supports_gradient_checkpointing:
        for one in statistics(model):
            one.last_count.zero_()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again = gradients(model, call)
        assert again.keys() == plain.keys()
        for key, gradient in plain.items():
            close = 1e-6 * gradient.abs().max().item()
            torch.testing.assert_close(again[key], gradient, atol=close, rtol=0)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    # 96 tokens, less those alone in their cluster, which carry nothing.
    assert all(80 <= one.weight.sum() <= 96 for one in statistics(model))


@pytest.mark.parametrize("name", EVERY)
def test_in_bfloat16_fresh_is_plain_and_statistics_stay_float32(name: str) -> None:
    model, call = build(name).bfloat16(), inputs(name, 3, 12)
    plain = logits(model, **call)
    acmoe.attach(model, AdaptiveConfig(momentum=0.5))
    assert torch.equal(logits(model, **call), plain)
    acmoe.calibrate(model, [inputs(name, 4, 24, seed=1)])
    found = logits(model, **call)
    assert found.dtype == plain.dtype and found.isfinite().all()
    assert not torch.equal(found, plain)
    assert {one.dtype for kept in statistics(model) for one in kept.buffers()} == {torch.float32}


@pytest.mark.parametrize("name", EVERY)
def test_our_experts_have_the_logits_of_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = measured(name)
    called = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        called.append(1)
        return experts_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "acmoe", counted)
    model.set_experts_implementation("eager")
    eager = logits(model, **inputs(name, 3, 12))
    model.set_experts_implementation("acmoe")
    found = logits(model, **inputs(name, 3, 12))
    close = 3e-6 * max(1.0, eager.abs().max().item())
    torch.testing.assert_close(found, eager, atol=close, rtol=0)
    assert bool(called) == (name not in OWN_EXPERTS)
