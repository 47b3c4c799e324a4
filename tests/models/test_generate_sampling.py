"""Which token is drawn next, when a sequence ends, and which requests are refused.

Shapes: B batch, L length, V words.
"""

from typing import Any

import pytest
import torch
from tiny_decoder import VOCAB, draw, trained

from acmoe.errors import NonFiniteError, UserError
from acmoe.models.text.generate import keep_likely, sample


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
        ({"stop_token": 1.5}, "stop_token=1.5; it must be a whole number"),
        ({"stop_token": "a"}, "stop_token='a'; it must be a whole number"),
        ({"stop_token": True}, "stop_token=True; it must be a whole number"),
        ({"seed": 1, "generator": torch.Generator()}, "both given"),
        ({"seed": 2**64}, "seed=18446744073709551616; it must lie between"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.int64)}, "prompt has shape \\(1, 0\\)"),
        ({"prompt": [[1], []]}, "a prompt is empty"),
        ({"prompt": [[1, 99]]}, "prompt holds id 99"),
        ({"prompt": [[1]], "prompt_mask": torch.ones(1, 1).bool()}, "needs none"),
        (
            {"prompt": torch.ones(1, 2).long(), "prompt_mask": [[True, True]]},
            "prompt_mask is a list; pass a bool tensor, True for real tokens",
        ),
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
