"""Token by token is the same model.

Shapes: B batch, L length, V words.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from acmoe.config.routing import AdaptiveConfig, CosineConfig, RouterConfig
from acmoe.config.text.language import LANGUAGE_MODELS, language_router
from acmoe.errors import NonFiniteError, UserError
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.generate import keep_likely, next_logits, sample
from acmoe.routing.state import Routing
from acmoe.routing.statistics.step import fold_statistics
from slow_cases import mostly_slow

VOCAB = 23
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


def trained(router: str | RouterConfig = "smoe", **changes: Any) -> LanguageModel:
    """In float64, with running statistics that two batches have moved off their start."""
    small = dataclasses.replace(
        LANGUAGE_MODELS["glam-nano"].config,
        **{
            **{"vocab_size": VOCAB, "dim": 8, "heads": 2, "hidden": 8, "num_experts": 4},
            **{"repeats": 2, "span": 6, "block": 6, **changes},
        },
    )
    torch.manual_seed(0)
    made = dataclasses.replace(small, router=language_router(router, small))
    model = LanguageModel(made).double()
    for seed in (100, 101):
        model(draw(seed, 4, 12))
        fold_statistics(model)
    return model.eval()


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


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


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others() -> None:
    model, prompt = trained(), draw(5, 2, 4)
    one = model.generate(prompt, 20, seed=1)
    assert torch.equal(model.generate(prompt, 20, seed=1), one)
    given = torch.Generator().manual_seed(1)
    assert torch.equal(model.generate(prompt, 20, generator=given), one)
    assert not torch.equal(model.generate(prompt, 20, seed=2), one)


def test_sampling_leaves_the_global_random_stream_alone() -> None:
    model = trained()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model.generate(draw(5, 2, 4), 5, seed=0)
    assert torch.equal(torch.rand(4), expected)


def test_a_sequence_ends_with_its_stop_token_and_is_filled_up_with_it() -> None:
    model, prompt = trained(), draw(6, 3, 4)
    free = model.generate(prompt, 15, temperature=0)
    stop = int(free[0, 2])
    found = model.generate(prompt, 15, temperature=0, stop_token=stop)
    for row, line in zip(free.tolist(), found.tolist(), strict=True):
        end = row.index(stop) + 1 if stop in row else len(row)
        assert line[:end] == row[: min(end, len(line))]
        assert set(line[end:]) <= {stop}
    alone = model.generate(prompt[:1], 15, temperature=0, stop_token=stop)
    assert alone.shape[1] == free[0].tolist().index(stop) + 1  # no step after the last one ended


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


def test_likely_tokens_are_kept_as_worked_out_by_hand() -> None:
    # Probabilities 0.1, 0.4, 0.2, 0.3.
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    kept = [
        torch.isfinite(keep_likely(logits, top_k, top_p))[0].tolist()
        for top_k, top_p in ((1, None), (2, None), (None, 0.4), (None, 0.41), (None, 1.0), (3, 0.7))
    ]
    assert kept == [
        [False, True, False, False],
        [False, True, False, True],
        [False, True, False, False],  # 0.4 hold 0.4
        [False, True, False, True],  # 0.4 do not hold 0.41
        [True, True, True, True],
        [False, True, False, True],  # of the three best 0.4, 0.3, 0.2: 4/9 + 3/9 hold 0.7
    ]


def test_samples_follow_the_probabilities_at_any_temperature() -> None:
    probability = torch.tensor([0.5, 0.3, 0.2])
    generator = torch.Generator().manual_seed(0)
    for temperature in (1.0, 0.5):
        logits = probability.log().expand(20_000, 3)
        drawn = sample(logits, temperature, generator=generator)
        share = drawn.bincount(minlength=3) / 20_000
        expected = probability ** (1 / temperature)
        # Standard error at most sqrt(0.25 / 20,000) = 0.0035.
        torch.testing.assert_close(share, expected / expected.sum(), rtol=0.0, atol=0.015)
    assert sample(torch.tensor([[1.0, 3.0, 2.0]]), 0.0).tolist() == [1]
    assert sample(torch.tensor([[1.0, 3.0, 2.0]]), 1e-45).tolist() == [1]  # 3 / 1e-45 overflows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": "hot"}, "temperature='hot'; it must be a number"),
        ({"temperature": None}, "temperature=None; it must be a number"),
        ({"top_p": "x"}, "top_p='x'; it must be a number"),
        ({"seed": 1.5}, "seed=1.5; it must be a whole number"),
        ({"prompt": None}, "prompt=None; pass ids, one row or list per prompt"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"stop_token": VOCAB}, "stop_token=23"),
        ({"seed": 1, "generator": torch.Generator()}, "both given"),
        ({"seed": 2**64}, "seed=18446744073709551616; it must lie between"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.int64)}, "prompt has shape \\(1, 0\\)"),
        ({"prompt": [[1], []]}, "a prompt is empty"),
        ({"prompt": [[1, 99]]}, "prompt holds id 99"),
        ({"prompt": [[1]], "prompt_mask": torch.ones(1, 1).bool()}, "needs none"),
        (
            {"prompt": torch.ones(1, 2).long(), "prompt_mask": torch.tensor([[True, False]])},
            "pad on the left",
        ),
        (
            {"prompt": torch.ones(1, 3).long(), "prompt_mask": torch.tensor([[True, False, True]])},
            "pad on the left",
        ),
        (
            {"prompt": torch.ones(1, 2).long(), "prompt_mask": torch.ones(1, 2)},
            "prompt_mask has dtype torch.float32; pass a bool tensor",
        ),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5; it must be a whole number"),
        ({"top_k": 1.5}, "top_k=1.5; it must be a whole number"),
        ({"prompt": [1, 2, 3]}, "prompt holds 1; pass one list of ids per prompt"),
        ({"prompt": "abc"}, "prompt holds 'a'; pass one list of ids per prompt"),
        ({"prompt": [[1.5]]}, "prompt has dtype torch.float32; pass token ids"),
        ({"prompt": torch.tensor([[]])}, r"prompt has shape \(1, 0\); pass ids"),
        ({"prompt": torch.ones(1, 2)}, "prompt has dtype torch.float32; pass token ids"),
        ({"prompt": torch.ones(1, 2).cfloat()}, "prompt has dtype torch.complex64; pass token"),
        ({"prompt": [[1], [True]]}, "prompt has dtype torch.bool; pass token ids"),
    ],
)
def test_a_wrong_request_is_named(arguments: dict[str, Any], message: str) -> None:
    given = {"prompt": torch.zeros(1, 2, dtype=torch.int64), "max_new_tokens": 2, **arguments}
    with pytest.raises(UserError, match=message):
        trained().generate(**given)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_without_finite_logits_generates_nothing(temperature: float, value: float) -> None:
    model = trained()
    with torch.no_grad():
        next(model.unembed.parameters()).fill_(value)
    with pytest.raises(NonFiniteError, match="NaN or infinity after the prompt; load"):
        model.generate([[1]], 3, temperature=temperature)


def test_a_hook_may_forbid_tokens() -> None:
    model, only = trained(), 7
    forbidden = torch.arange(VOCAB) != only
    model.unembed.register_forward_hook(
        lambda module, inputs, out: out.masked_fill(forbidden, -torch.inf)
    )
    assert model.generate([[1]], 3).tolist() == [[only] * 3]


def test_a_prompt_of_bytes_is_one_of_ids() -> None:
    model, prompt = trained(), draw(9, 2, 4)
    assert torch.equal(
        model.generate(prompt.to(torch.uint8), 3, temperature=0),
        model.generate(prompt, 3, temperature=0),
    )


def test_a_router_that_picks_among_all_tokens_cannot_generate() -> None:
    with pytest.raises(UserError, match="expert-choice"):
        trained("expert-choice").generate(torch.zeros(1, 2, dtype=torch.int64), 2)


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
