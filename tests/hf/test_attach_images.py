"""Models of text and images: calls with images route, count and generate as calls with text."""

from typing import Any

import pytest
import torch
import transformers
from attached import CLOSE, logits, statistics
from small_images import IMAGE, WHOLE, build_whole, call_with_images
from torch import Tensor, nn

import acmoe
from acmoe import AdaptiveConfig, UserError
from acmoe.hf.tape import mask_of_layers

REFUSED = "ernie4_5_vl_moe"  # gives the text router a part of the tokens
KNOWN = [name for name in WHOLE if hasattr(transformers, WHOLE[name].model) and name != REFUSED]
ALL = [pytest.param(n, marks=() if n == "gemma4" else pytest.mark.slow) for n in KNOWN]
gemma4 = pytest.mark.skipif("gemma4" not in KNOWN, reason="transformers has no Gemma 4")


def measured(name: str, call: dict[str, Tensor], mode: str = "running") -> Any:
    model = acmoe.attach(build_whole(name), AdaptiveConfig(momentum=0.0, statistics=mode))
    return acmoe.calibrate(model, [call])


@pytest.mark.parametrize("name", ALL)
def test_fresh_is_plain_and_a_training_step_moves_the_statistics(name: str) -> None:
    model, call = build_whole(name), call_with_images(name)
    plain = logits(model, **call)
    acmoe.attach(model, AdaptiveConfig(momentum=0.5))
    assert torch.equal(logits(model, **call), plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.train()(**call, labels=call["input_ids"]).loss.backward()
    optimizer.step()
    # All 32 tokens but those alone in their cluster, which carry nothing.
    assert all(24 <= one.weight.sum() <= 32 for one in statistics(model))
    assert not torch.equal(logits(model.eval(), **call), plain)


@pytest.mark.parametrize("mode", ["running", "prefix"])
@pytest.mark.parametrize("name", ALL)
def test_decoding_after_an_image_equals_the_whole_forward(name: str, mode: str) -> None:
    call = call_with_images(name)
    model = measured(name, call, mode)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    found = model.generate(
        **call,
        **options,
        bad_words_ids=[[token] for token in range(IMAGE, 97)],
        return_dict_in_generate=True,
        output_logits=True,
    )
    sequences = found.sequences[:, :-1]
    longer = call | {"input_ids": sequences, "attention_mask": torch.ones_like(sequences)}
    if "mm_token_type_ids" in call:
        longer["mm_token_type_ids"] = torch.nn.functional.pad(call["mm_token_type_ids"], (0, 3))
    whole = logits(model, **longer)
    for step, step_logits in enumerate(found.logits):
        torch.testing.assert_close(step_logits, whole[:, 15 + step], **CLOSE)


def counts(model: nn.Module) -> list[Tensor]:
    return [one.weight.clone() for one in statistics(model)]


@gemma4
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_is_read_from_the_masks_that_gemma_makes_for_its_layers(attention: str) -> None:
    """Its text model gets a dict of 4-D masks. Padding must count in no statistic and move none."""
    call = call_with_images("gemma4")
    bare = measured("gemma4", call)
    model = build_whole("gemma4")
    model.set_attn_implementation(attention)
    blank = torch.zeros(2, 5, dtype=torch.long)
    names = ("input_ids", "attention_mask", "mm_token_type_ids")
    padded = call | {name: torch.cat([blank, call[name]], 1) for name in names}
    padded["position_ids"] = (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    acmoe.calibrate(acmoe.attach(model, AdaptiveConfig(momentum=0.0)), [padded])
    for one, other in zip(counts(model), counts(bare), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(logits(model, **padded)[:, 5:], logits(bare, **call), **CLOSE)


@gemma4
def test_a_static_cache_is_refused_for_prefix_statistics_by_its_masks() -> None:
    call = call_with_images("gemma4")
    model = measured("gemma4", call, "prefix")
    with pytest.raises(UserError, match=r"attention_mask is a dict \(.*without a static cache"):
        model.generate(**call, max_new_tokens=4, min_new_tokens=4, cache_implementation="static")


def test_a_dict_of_masks_tells_the_padding_or_is_refused() -> None:
    """Two cached tokens and three new ones, of which the first new one is padding."""
    sees = torch.ones(1, 1, 3, 5).tril(2).bool()
    sees[..., 2] = False  # nothing sees the padding
    real = torch.tensor([[False, True, True]])
    added = torch.zeros(1, 1, 3, 5).masked_fill(~sees, torch.finfo(torch.float32).min)
    seen = torch.tensor([[1, 1, 0, 1, 1]])  # of flash attention
    window = sees[..., 2:]
    for full in (sees, added, seen):
        found = mask_of_layers({"sliding": window, "full": full}, 2, 3, "prefix")
        assert found is not None and torch.equal(found[:, 2:].bool(), real)
    assert mask_of_layers({"full": None, "sliding": window}, 2, 3, "prefix") is None
    for masks in ({"sliding": window}, {"full": torch.ones(1, 1, 3, 9)}, {"full": object()}):
        with pytest.raises(UserError, match=r"attention_mask is a dict \((full|sliding): "):
            mask_of_layers(masks, 2, 3, "prefix")


def test_a_router_that_reads_a_part_of_the_tokens_is_refused() -> None:
    call = call_with_images(REFUSED)
    model = acmoe.attach(build_whole(REFUSED))
    text = {"input_ids": call["input_ids"][:, 8:]}
    text["moe_mm_token_type_ids"] = torch.zeros_like(text["input_ids"])
    assert logits(model, **text).isfinite().all()
    message = r"text_moe.gate was called with \(24, 32\) in a call of 2 sequences of 16 tokens"
    with pytest.raises(UserError, match=message):
        model(**call)
