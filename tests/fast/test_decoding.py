"""Decode steps on rings of fixed size are the same model.

Shapes: B batch, L length, V words.
"""

import dataclasses
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from acmoe.config.routing import AdaptiveConfig, RouterConfig
from acmoe.config.text.language import LANGUAGE_MODELS, language_router
from acmoe.fast import accelerate, restore
from acmoe.fast.decoding import RingSteps, capture_unsupported, captured_steps
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.generate import decode_steps, next_logits
from acmoe.ops import dispatch
from slow_cases import mostly_slow

VOCAB = 23
SHAPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "zeros": {"empty_memory": "zeros"},
    "modern": {"norm": "pre", "position": "rope"},
}


def small(router: str | RouterConfig = "smoe", **changes: Any) -> LanguageModel:
    """A model in float64 whose heads have 4 features, stored as 8, and a span of 6 tokens."""
    sizes = {"vocab_size": VOCAB, "dim": 8, "heads": 2, "hidden": 8, "num_experts": 4, "repeats": 2}
    config = dataclasses.replace(
        LANGUAGE_MODELS["glam-nano"].config, **{**sizes, "span": 6, "block": 6, **changes}
    )
    torch.manual_seed(0)
    config = dataclasses.replace(config, router=language_router(router, config))
    return LanguageModel(config).double().eval()


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@mostly_slow(
    ("shape", "prompt"),
    [(shape, prompt) for prompt in (9, 1, 3) for shape in SHAPES],
    keep=range(len(SHAPES) + 1),  # every shape with a long prompt, one with a prompt of one token
)
@torch.no_grad()
def test_steps_on_rings_equal_the_whole_forward(shape: str, prompt: int) -> None:
    # 24 steps go round a ring of 8 places three times.
    router = AdaptiveConfig(statistics="prefix") if shape == "paper" else "smoe"
    model, tokens = small(router, **SHAPES[shape]), draw(0, 3, prompt + 24)
    whole = model(tokens).logits
    cache = model.new_cache(3)
    next_logits(model, tokens[:, :prompt], cache)
    step = RingSteps(model, cache, 24, capture=False)
    assert step.cache.clock.real_BN.shape == (3, 8)
    for place in range(prompt, prompt + 24):
        logits = step(tokens[:, place : place + 1], None)
        torch.testing.assert_close(logits, whole[:, place], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_padding_and_finished_sequences_are_masked_as_in_plain_steps(shape: str) -> None:
    model = small(**SHAPES[shape])
    tokens, mask = draw(1, 2, 5), torch.ones(2, 5, dtype=torch.bool)
    mask[0, :3] = False
    logits = []
    for ring in (False, True):
        cache = model.new_cache(2)
        next_logits(model, tokens, cache, mask)
        step = decode_steps(model, cache, 12, True)
        if ring:
            step = RingSteps(model, cache, 12, capture=False)
        # The second sequence ends after two steps; after six more it sees no token at all.
        going = [torch.tensor([[True], [number < 2]]) for number in range(12)]
        logits.append([step(draw(number, 2, 1), one) for number, one in enumerate(going)])
    for plain, found in zip(*logits, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)


class Counted(TorchDispatchMode):
    """Count the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_step_computes_angles_and_mask_once_for_all_blocks() -> None:
    model = small(**SHAPES["modern"], repeats=3)
    cache = model.new_cache(1)
    next_logits(model, draw(0, 1, 4), cache)
    step = RingSteps(model, cache, 9, capture=False)
    with Counted() as counted:
        step(draw(1, 1, 1), None)
    assert counted.calls["cos"] == counted.calls["sin"] == counted.calls["masked_fill"] == 1
    assert counted.calls["index_copy_"] == 1 + 2 * len(model.blocks)  # the mask, keys and values


@torch.no_grad()
def test_a_step_with_relative_positions_reads_their_columns_once() -> None:
    model = small(repeats=3)
    cache = model.new_cache(1)
    next_logits(model, draw(0, 1, 4), cache)
    step = RingSteps(model, cache, 9, capture=False)
    assert step.cache.clock.rotation_21J is None
    with Counted() as counted:
        step(draw(1, 1, 1), None)
    assert counted.calls["cos"] == 0
    assert counted.calls["masked_fill"] == len(model.blocks)  # scores differ from block to block
    assert step.cache.clock.shared["positions"].shape == (8, 8)  # stored features, places


@torch.no_grad()
def test_a_ring_has_no_more_places_than_the_text_has_tokens() -> None:
    model = small(span=1000)
    cache = model.new_cache(1)
    next_logits(model, draw(0, 1, 4), cache)
    step = RingSteps(model, cache, 9, capture=False)
    assert step.cache.clock.real_BN.shape == (1, 16)  # 13 tokens, in eights
    assert step.cache.blocks[0].keys.shape == (1, 2, 16, 8)


def test_accelerate_puts_captured_steps_in_and_restore_takes_them_out() -> None:
    model = small()
    assert accelerate(model).decode_steps is captured_steps
    assert restore(model).decode_steps is decode_steps


def test_a_cpu_decodes_plainly_and_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    model = small()
    with caplog.at_level(logging.INFO, "acmoe"):
        plain = model.generate(draw(0, 1, 4), 20, temperature=0)
        found = accelerate(model).generate(draw(0, 1, 4), 20, temperature=0)
    assert torch.equal(found, plain)
    assert "decode steps are not captured: CUDA graphs need a CUDA device, not cpu" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_captured_steps_generate_the_same_tokens(shape: str) -> None:
    model = small(AdaptiveConfig(statistics="running"), **SHAPES[shape]).float().cuda()
    prompts = [draw(seed, length).cuda() for seed, length in ((1, 2), (2, 9), (3, 5))]
    options: dict[str, Any] = {"temperature": 0, "stop_token": 3}
    plain = model.generate(prompts, 40, **options)
    assert torch.equal(accelerate(model).generate(prompts, 40, **options), plain)
    assert capture_unsupported(model) is None


@pytest.mark.gpu
def test_a_model_with_hooks_is_not_captured() -> None:
    model = small().float().cuda()
    model.blocks[0].layer.register_forward_hook(lambda *_: None)
    assert "blocks.0.layer has hooks" in str(capture_unsupported(model))
