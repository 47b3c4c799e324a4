"""Token by token is the same model.

Shapes: B batch, L length, V words.
"""

from typing import Any, Self

import pytest
import torch
from tiny_decoder import VOCAB, draw, trained
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from acmoe.config.routing import AdaptiveConfig, CosineConfig, RouterConfig
from acmoe.errors import UserError
from acmoe.models.text.generate import next_logits
from acmoe.routing.state import Routing
from slow_cases import mostly_slow

ROUTERS: dict[str, str | RouterConfig] = {
    "smoe": "smoe",
    "running": AdaptiveConfig(statistics="running"),
    "running-current": AdaptiveConfig(statistics="running", statistics_of="current"),
    "prefix": AdaptiveConfig(statistics="prefix"),
    "prefix-mix": AdaptiveConfig(statistics="prefix", mix=2),
    "prefix-cosine": AdaptiveConfig(statistics="prefix", base=CosineConfig()),
    "stable": "stable",
    "hash": "hash",
    "threshold": "threshold",
}
SHAPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "zeros": {"empty_memory": "zeros"},
    "modern": {"norm": "pre", "position": "rope"},
}
# Two routers in the paper's shape, and one in every shape; the other pairs are slow.
PAIRS = [
    pytest.param(router, changes, id=f"{shape}-{name}", marks=() if quick else pytest.mark.slow)
    for shape, changes in SHAPES.items()
    for name, router in ROUTERS.items()
    for quick in [name == "prefix" or (shape, name) == ("paper", "running")]
]


@pytest.mark.parametrize(("router", "changes"), PAIRS)
def test_cached_steps_equal_the_whole_forward(
    router: str | RouterConfig, changes: dict[str, Any]
) -> None:
    model, tokens = trained(router, **changes), draw(0, 3, 30)
    steps: list[Routing] = []
    with torch.no_grad():
        whole = model(tokens, return_routings=True)
        cache = model.new_cache(3)
        handles = [
            layer.next_state.register_forward_pre_hook(lambda module, given: steps.append(given[1]))
            for layer in model.moe_layers()
        ]
        # A prompt of 8, a piece of 3, then single tokens far past the span of 6.
        place = 0
        for count in (8, 3, *([1] * 19)):
            steps.clear()
            logits = next_logits(model, tokens[:, place : place + count], cache)
            place += count
            torch.testing.assert_close(logits, whole.logits[:, place - 1], rtol=1e-10, atol=1e-10)
            for step, full in zip(steps, whole.routings, strict=True):
                expected = full.expert_ids.view(3, 30, -1)[:, place - count : place]
                assert torch.equal(step.expert_ids.view(3, count, -1), expected)
        for handle in handles:
            handle.remove()


@mostly_slow(
    ("router", "changes"),
    [(router, changes) for changes in SHAPES.values() for router in ROUTERS.values()],
    ids=[f"{shape}-{name}" for shape in SHAPES for name in ROUTERS],
    keep={2 * len(ROUTERS) + 3},  # a modern shape, prefix
)
def test_prompts_of_different_lengths_continue_as_if_alone(
    router: str | RouterConfig, changes: dict[str, Any]
) -> None:
    model = trained(router, **changes)
    prompts = [draw(seed, length) for seed, length in ((1, 2), (2, 9), (3, 5))]
    together = model.generate(prompts, 12, temperature=0)
    assert together.shape == (3, 12)
    for prompt, expected in zip(prompts, together, strict=True):
        assert torch.equal(model.generate(prompt, 12, temperature=0)[0], expected)


def test_a_padded_tensor_means_the_same_as_a_list() -> None:
    model = trained("adaptive")
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    padded = torch.tensor([[-9, -9, 1, 2, 3], [4, 5, 6, 7, 8]])
    mask = padded >= 0
    expected = model.generate(prompts, 7, temperature=0)
    assert torch.equal(model.generate(padded, 7, prompt_mask=mask, temperature=0), expected)


def test_greedy_takes_the_likeliest_token_of_the_whole_forward() -> None:
    model, text = trained("adaptive"), draw(4, 2, 5)
    found = model.generate(text, 9, temperature=0)
    for _ in range(9):
        text = torch.cat([text, model(text).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, text[:, 5:])


def test_blocks_of_kept_tokens_join_to_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = trained(), torch.tensor([[1, 2, 3]])
    whole = [model.generate(prompt, length, temperature=0.0) for length in (6, 7)]
    monkeypatch.setattr("acmoe.models.text.generate.BLOCK", 3)
    for found in whole:
        assert torch.equal(model.generate(prompt, found.shape[1], temperature=0.0), found)


def test_each_step_tells_its_tokens() -> None:
    model, prompt = trained(), draw(6, 3, 4)
    told: list[Tensor] = []
    found = model.generate(prompt, 7, seed=0, on_token=told.append)
    assert torch.equal(torch.stack(told, dim=1), found)
    stop, told = int(found[0, 2]), []
    found = model.generate(prompt, 7, seed=0, stop_token=stop, on_token=told.append)
    assert torch.equal(torch.stack(told, dim=1), found)


def test_generation_leaves_training_mode_as_it_was() -> None:
    model = trained("adaptive").train()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.generate(draw(7, 1, 3), 3, temperature=0)
    assert model.training
    for name, value in model.named_buffers():
        assert torch.equal(value, buffers[name]), name
    with pytest.raises(UserError):
        model.generate(torch.tensor([[VOCAB]]), 3)
    assert model.training


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_generation_leaves_the_mode_of_every_module_as_it_was(mode: bool) -> None:
    model = trained().train(mode)
    model.blocks[0].train(not mode)  # a frozen block, or dropout that draws in evaluation
    modes = {name: module.training for name, module in model.named_modules()}
    model.generate(draw(7, 1, 3), 2, temperature=0)
    assert {name: module.training for name, module in model.named_modules()} == modes


class Merging(nn.LayerNorm):
    """Merges a weight in evaluation mode and takes it out in training mode, as loralib does."""

    merged = False

    def train(self, mode: bool = True) -> Self:
        self.merged = not mode
        return super().train(mode)


def test_generation_calls_the_train_method_of_a_module() -> None:
    model = trained().train()
    model.blocks[0].register_module("other", Merging(2))
    model.generate(draw(7, 1, 3), 2, temperature=0)
    assert model.blocks[0].other.training and not model.blocks[0].other.merged


def test_batch_statistics_decode_with_those_of_the_prompt() -> None:
    # One token has no dispersion: without the prompt's statistics decoding would be plain routing.
    model, tokens = trained(AdaptiveConfig(statistics="batch")), draw(8, 1, 12)
    plain = trained("smoe")
    with torch.no_grad():
        cache, other = model.new_cache(1), plain.new_cache(1)
        torch.testing.assert_close(
            next_logits(model, tokens[:, :11], cache), model(tokens[:, :11]).logits[:, -1]
        )
        next_logits(plain, tokens[:, :11], other)
        found = next_logits(model, tokens[:, 11:], cache)
        unscaled = next_logits(plain, tokens[:, 11:], other)
    assert F.mse_loss(found, unscaled) > 1e-6
