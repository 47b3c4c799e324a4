"""The fast runner steps aside where a module was changed: hooks, adapters, replaced outputs."""

import logging

import pytest
import torch
from accelerate_cases import TOKENS, build, outcome
from torch import Tensor, nn
from torch.nn.utils import parametrize

import acmoe
from acmoe.fast import accelerate, explain
from acmoe.models.text.blocks import PostNormBlock
from acmoe.ops import dispatch


class LoRA(nn.Module):
    """A linear layer with a low-rank adapter beside it, as PEFT wraps one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(3)
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.parametrize("layer", ["query", "key", "value", "output"])
def test_hooks_on_projections_fire_once_in_every_block(layer: str) -> None:
    model, calls = accelerate(build()), []
    for block in model.blocks:
        getattr(block.attention, layer).register_forward_hook(lambda *_: calls.append(1))
    model(TOKENS)
    assert len(calls) == len(model.blocks)


@pytest.mark.parametrize("layer", ["query", "key", "value", "output"])
def test_a_lora_adapter_changes_the_output_as_on_the_plain_path(layer: str) -> None:
    model = build()
    plain = model(TOKENS).logits
    attention = model.blocks[1].attention
    setattr(attention, layer, LoRA(getattr(attention, layer)))
    expected = outcome(model)
    assert not torch.allclose(model(TOKENS).logits, plain)
    accelerate(model)
    assert explain(model) == f"blocks.1.attention.{layer} is a LoRA, not a Linear"
    for found, other in zip(outcome(model), expected, strict=True):
        assert torch.equal(found, other)


def test_hooks_and_adapters_on_the_output_layer_count_in_the_loss_too() -> None:
    model, calls = build(), []
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[0, :5] = False
    arguments = {"targets": TOKENS.roll(-1, 1), "token_mask": mask}
    plain = model(TOKENS, **arguments).loss
    handle = model.unembed.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(model(TOKENS, **arguments).loss, plain)
    assert calls == [1]
    handle.remove()
    model.unembed = LoRA(model.unembed)
    loss = model(TOKENS, **arguments).loss
    logits = model(TOKENS, token_mask=mask).logits
    expected = nn.functional.cross_entropy(logits[mask], arguments["targets"][mask])
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, plain)


def test_the_loss_of_a_wrapped_output_layer_is_one_graph_in_which_padding_holds_anything() -> None:
    model = build()
    model.unembed = LoRA(model.unembed)
    targets = TOKENS.roll(-1, 1)
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[0, :5] = False
    hidden = torch.randn(
        *TOKENS.shape, model.config.dim, generator=torch.Generator().manual_seed(5)
    )
    hidden[~mask] = torch.nan
    expected = nn.functional.cross_entropy(model.unembed(hidden[mask]), targets[mask])
    expected_gradients = torch.autograd.grad(expected, list(model.unembed.parameters()))
    torch.compiler.reset()
    compiled = torch.compile(model.mean_loss, fullgraph=True, backend="aot_eager")
    for run in (model.mean_loss, compiled):
        x = hidden.clone().requires_grad_()
        model.zero_grad()
        loss = run(x, targets, mask)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        assert x.grad is not None and not x.grad[~mask].any() and x.grad[mask].any()
        for one, other in zip(model.unembed.parameters(), expected_gradients, strict=True):
            torch.testing.assert_close(one.grad, other)
    nothing = model.mean_loss(hidden, targets, torch.zeros_like(mask))
    assert nothing.item() == 0.0


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_replaced_block_output_is_replaced_altogether(backend: str) -> None:
    model = build()
    other = torch.randn(2, 48, model.config.dim, generator=torch.Generator().manual_seed(5))

    def ablate(block: nn.Module, arguments: object, output: tuple) -> tuple:
        return other, output[1]

    model.blocks[0].register_forward_hook(ablate)
    expected = model(TOKENS).logits
    with dispatch.use_backend(backend):
        found = accelerate(model)(TOKENS).logits
    torch.testing.assert_close(found, expected)
    # Independently: begin at the second block with the replacement.
    embedded = model.embed(TOKENS)
    model.blocks[0]._forward_hooks.clear()
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(_[2][1]))
    model(TOKENS)
    from acmoe.models.text.stack import BlockInputs

    inputs, x, state = BlockInputs(model.positions, None, None, TOKENS), other, seen[0]
    for block in model.blocks[1:]:
        x, state = block(x, state, x, inputs)
    torch.testing.assert_close(found, model.unembed(model.norm(x)))
    assert embedded.shape == other.shape


class Wider(nn.LayerNorm):
    pass


class OwnMoE(acmoe.MoE):
    def forward(self, x, state, *, token_mask=None, token_ids=None, cache=None):
        y, state = super().forward(x, state, token_mask=token_mask, cache=cache)
        return 2 * y, state


CHANGES = {
    "blocks.0 has hooks": lambda m: m.blocks[0].register_forward_pre_hook(lambda *_: None),
    "blocks.1.attention has hooks": lambda m: m.blocks[1].attention.register_full_backward_hook(
        lambda *_: None
    ),
    "blocks.0.layer has hooks": lambda m: m.blocks[0].layer.register_forward_hook(lambda *_: None),
    "blocks.1.layer is a Sequential, not a FeedForward": lambda m: setattr(
        m.blocks[1], "layer", nn.Sequential(nn.Linear(m.config.dim, m.config.dim), nn.ReLU())
    ),
    "blocks.0.layer is a OwnMoE, not a MoE": lambda m: setattr(
        m.blocks[0].layer, "__class__", OwnMoE
    ),
    "blocks.0.attention.query has a bias": lambda m: setattr(
        m.blocks[0].attention, "query", nn.Linear(m.config.dim, m.config.dim)
    ),
    "blocks.0.norm_layer is a Wider, not a LayerNorm": lambda m: setattr(
        m.blocks[0], "norm_layer", Wider(m.config.dim)
    ),
    "blocks.0.dropout is a AlphaDropout, not a Dropout": lambda m: setattr(
        m.blocks[0], "dropout", nn.AlphaDropout(0.0)
    ),
    "blocks.0.attention.key is a ParametrizedLinear, not a Linear": (
        lambda m: parametrize.register_parametrization(
            m.blocks[0].attention.key, "weight", Halved()
        )
    ),
    "blocks.1.attention.value has a forward method of its own": lambda m: setattr(
        m.blocks[1].attention.value, "forward", lambda x: 2 * x
    ),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_changed_module_is_named_and_the_plain_path_runs(reason, caplog, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    model = build()
    CHANGES[reason](model)
    expected = model(TOKENS).logits
    accelerate(model)
    assert explain(model) == reason
    with caplog.at_level(logging.INFO, logger="acmoe"):
        assert torch.equal(model(TOKENS).logits, expected)
    assert f"the blocks run on the plain path: {reason}" in caplog.messages


def test_a_block_of_ones_own_runs_as_it_is() -> None:
    class Doubled(PostNormBlock):
        def forward(self, *arguments, **named):
            x, state = super().forward(*arguments, **named)
            return 2 * x, state

    model = build()
    model.blocks[0].__class__ = Doubled
    expected = model(TOKENS).logits
    accelerate(model)
    assert explain(model) == "blocks.0 is a Doubled, not a PostNormBlock"
    assert torch.equal(model(TOKENS).logits, expected)
