"""A model that gives NaN or infinity while it generates is refused in one line."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from acmoe.config.text.language import LanguageConfig
from acmoe.errors import NonFiniteError
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.generate import DecodeSteps, decode_steps
from slow_cases import mostly_slow


def spoilt(value: float, at_step: int, row: int = 0) -> DecodeSteps:
    """Return decode steps whose `at_step`-th, from 1, gives `value` in one row of the logits."""

    def make(*arguments, **options):
        step, count = decode_steps(*arguments, **options), 0

        def spoiling(tokens_B1: Tensor, mask_B1: Tensor | None) -> Tensor:
            nonlocal count
            count += 1
            logits_BV = step(tokens_B1, mask_B1)
            if count == at_step:
                logits_BV[row] = value
            return logits_BV

        return spoiling

    return make


def tiny_model() -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageConfig(
        vocab_size=11, dim=8, heads=2, hidden=8, repeats=2, num_experts=4, block=8, span=8
    )
    return LanguageModel(config).eval()


def assert_named(value: float, temperature: float, at_step: int, count: int) -> None:
    model = tiny_model()
    model.decode_steps = spoilt(value, at_step, row=1)
    # Step n computes the logits after n new tokens.
    expected = f"the model gives NaN or infinity after {at_step} new tokens; load one with finite"
    with pytest.raises(NonFiniteError, match=expected):
        model.generate([[1], [2]], count, temperature=temperature, seed=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at_step", [1, 3])
def test_the_number_of_good_tokens_is_named(value: float, temperature: float, at_step: int) -> None:
    assert_named(value, temperature, at_step, count=6)


BLOCKS = itertools.product([1, 3, 299], [0.0, 1.0], [float("nan"), float("inf"), float("-inf")])


@mostly_slow(("at_step", "temperature", "value"), BLOCKS, keep={0, 16})
def test_the_number_counts_the_blocks_of_256_tokens_before(
    at_step: int, temperature: float, value: float
) -> None:
    """A block is checked when it is full: a value of the first one may be followed by many."""
    assert_named(value, temperature, at_step, count=310)


def test_logits_that_no_token_is_drawn_from_are_not_asked_for() -> None:
    """Two tokens need the logits of the prompt and of one step."""
    model = tiny_model()
    expected = model.generate([[1]], 2, seed=0)
    model.decode_steps = spoilt(float("nan"), 2)
    assert torch.equal(model.generate([[1]], 2, seed=0), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"seed": 0}, {"seed": 0, "top_k": 5, "top_p": 0.9}]
)
def test_a_sequence_that_has_ended_may_give_anything(value: float, options: dict[str, Any]) -> None:
    model, prompts = tiny_model(), [[1], [2]]
    first, other = model.generate(prompts, 4, **options)
    stop = int(first[0])
    assert stop not in other[:3].tolist()  # the second sequence goes on
    expected = model.generate(prompts, 4, **options, stop_token=stop)
    model.decode_steps = spoilt(value, 2, row=0)
    found = model.generate(prompts, 4, **options, stop_token=stop)
    assert torch.equal(found, expected) and found[0].tolist() == [stop] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sequence_that_goes_on_beside_one_that_has_ended_must_be_finite(
    temperature: float,
) -> None:
    model, prompts = tiny_model(), [[1], [2]]
    stop = int(model.generate(prompts, 4, temperature=temperature, seed=0)[0, 0])
    model.decode_steps = spoilt(float("nan"), 2, row=1)
    with pytest.raises(NonFiniteError, match="after 2 new tokens"):
        model.generate(prompts, 4, temperature=temperature, seed=0, stop_token=stop)


def test_another_error_of_a_step_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(torch, "multinomial", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        tiny_model().generate([[1]], 2)
