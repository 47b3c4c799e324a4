"""Generation by the language model as a transformers model: cache, beams, padding, sampling."""

import pytest
import torch
from hf_cases import language_model, wrapped

from acmoe.errors import UserError

pytest.importorskip("transformers")


def test_generate_equals_our_own_with_cache_and_without(pair, prompts):
    model, ours = pair
    expected = model.generate(prompts, 14, temperature=0)  # past the span of 8
    options = {"max_new_tokens": 14, "do_sample": False}
    cached = ours.generate(prompts, **options)
    assert torch.equal(cached[:, 12:], expected)
    assert torch.equal(cached, ours.generate(prompts, use_cache=False, **options))


def test_beams_are_the_same_with_cache_and_without(pair, prompts):
    _, ours = pair
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": 3}
    cached = ours.generate(prompts, **options)
    assert torch.equal(cached, ours.generate(prompts, use_cache=False, **options))
    assert not torch.equal(cached, ours.generate(prompts, max_new_tokens=10, do_sample=False))


def test_a_prompt_padded_on_the_left_continues_as_alone(pair, prompts):
    _, ours = pair
    options = {"max_new_tokens": 10, "do_sample": False}
    alone = ours.generate(prompts[1:, 5:], **options)
    padded, mask = prompts.clone(), torch.ones_like(prompts)
    padded[1, :5], mask[1, :5] = 256, 0
    both = ours.generate(padded, attention_mask=mask, **options)
    assert torch.equal(both[1, 5:], alone[0])
    assert torch.equal(both[:1], ours.generate(prompts[:1], **options))


def test_a_sequence_that_ended_is_filled_with_padding(pair, prompts):
    _, ours = pair
    free = ours.generate(prompts, max_new_tokens=10, do_sample=False)
    stop = int(free[0, 14])
    found = ours.generate(prompts, max_new_tokens=10, do_sample=False, eos_token_id=stop)
    ends = (free[:, 12:] == stop).int().argmax(1) + 12
    for row, end in enumerate(ends.tolist()):
        if (free[row, 12:] == stop).any():
            assert torch.equal(found[row, : end + 1], free[row, : end + 1])
            assert (found[row, end + 1 :] == 256).all()


def test_sampling_is_repeatable(pair, prompts):
    _, ours = pair
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(ours.generate(prompts, max_new_tokens=8, do_sample=True, top_k=50))
    assert torch.equal(*draws)
    assert int(draws[0].max()) < 256


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_lookup_num_tokens": 2}, "assisted generation is not supported"),
        ({"cache_implementation": "static"}, "leave it out"),
    ],
)
def test_what_cannot_be_generated_is_refused(pair, prompts, options, says):
    with pytest.raises((UserError, ValueError), match=says):
        pair[1].generate(prompts[:1], max_new_tokens=4, do_sample=False, **options)


def test_prompts_padded_on_the_right_are_refused(pair, prompts):
    mask = torch.ones_like(prompts)
    mask[0, -2:] = 0
    with pytest.raises(UserError, match="pad prompts on the left"):
        pair[1].generate(prompts, attention_mask=mask, max_new_tokens=2, do_sample=False)


def test_a_router_that_reads_the_whole_text_cannot_generate(prompts):
    ours = wrapped(language_model("expert-choice"))
    with pytest.raises(UserError, match="expert-choice"):
        ours.generate(prompts, max_new_tokens=2, use_cache=False)
