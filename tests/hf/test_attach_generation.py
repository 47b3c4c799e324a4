"""Generation with an attached model: what the cache carries is what the whole forward sees."""

import contextlib
from typing import Any

import pytest
import torch
from attached import CLOSE, ids, left_padded, logits, measured
from torch import Tensor
from transformers import DynamicCache

import acmoe
from acmoe import UserError


def generated(model: Any, tokens: Tensor, **options: Any) -> Any:
    fixed = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    return model.generate(tokens, **{**fixed, **options})


@pytest.mark.parametrize("mode", [pytest.param("running", marks=pytest.mark.slow), "prefix"])
def test_decoding_equals_the_whole_forward_with_and_without_cache_and_beams(mode: str) -> None:
    model, tokens = measured(statistics=mode), ids()
    found = generated(model, tokens, return_dict_in_generate=True, output_logits=True)
    whole = logits(model, input_ids=found.sequences[:, :-1])
    for step, step_logits in enumerate(found.logits):
        torch.testing.assert_close(step_logits, whole[:, 9 + step], **CLOSE)
    assert torch.equal(generated(model, tokens, use_cache=False), found.sequences)
    beams = [generated(model, tokens, num_beams=3, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*beams)
    padded = left_padded(tokens, 3)
    del padded["position_ids"]
    continued = model.generate(**padded, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(continued[:, 3:], found.sequences)


def test_assisted_decoding_is_right_for_running_and_refused_for_prefix_statistics() -> None:
    tokens = ids(1, 12)
    model = measured()
    assert torch.equal(
        generated(model, tokens, prompt_lookup_num_tokens=2), generated(model, tokens)
    )
    with pytest.raises(UserError, match="statistics='prefix' cannot be cropped"):
        generated(measured(statistics="prefix"), tokens, prompt_lookup_num_tokens=2)


def test_drafts_of_the_first_layers_are_right_for_running_and_refused_for_prefix() -> None:
    """For a draft transformers lowers `config.num_hidden_layers`, and leaves it so at an error."""
    model, tokens = measured(), ids(1, 12)
    assert torch.equal(generated(model, tokens, assistant_early_exit=2), generated(model, tokens))
    with torch.no_grad():
        states = model(input_ids=tokens, output_hidden_states=True).hidden_states
        second = model.lm_head(model.model.norm(states[2]))
    model.config.num_hidden_layers = 2
    torch.testing.assert_close(logits(model, input_ids=tokens), second, **CLOSE)

    model = measured(statistics="prefix")
    message = r"num_hidden_layers=2 leaves out model.layers.2.mlp.gate .* not 'prefix'; set it back"
    with pytest.raises(UserError, match=message):
        generated(model, tokens, assistant_early_exit=2)
    with pytest.raises(UserError, match=message):
        generated(model, tokens)
    model.config.num_hidden_layers = 4
    assert generated(model, tokens).shape == (1, 17)


def test_an_assistant_of_gemma_4_drafts_for_an_attached_model() -> None:
    """It asks whether the name of the class of its target begins with Gemma4."""
    transformers = pytest.importorskip("transformers", "5.22")
    model, tokens = measured("gemma4"), ids(1, 12)
    text = acmoe.detach(measured("gemma4")).config
    text.update({"enable_moe_block": False, "num_kv_shared_layers": text.num_hidden_layers})
    text.update({"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0})
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32)
    assistant = transformers.Gemma4AssistantForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = 3
    found = generated(model, tokens, assistant_model=assistant)
    assert torch.equal(found, generated(model, tokens))
    assert type(model).__name__ == "AdaptiveGemma4ForCausalLM"


def test_a_static_cache_serves_running_statistics_and_is_refused_for_prefix() -> None:
    model, tokens = measured(), ids()
    static = generated(model, tokens, cache_implementation="static")
    assert torch.equal(static, generated(model, tokens))
    with pytest.raises(UserError, match="generate without a static cache"):  # its mask is 4-D
        generated(measured(statistics="prefix"), tokens, cache_implementation="static")


@pytest.mark.parametrize("mode", ["batch", pytest.param("sequence", marks=pytest.mark.slow)])
def test_statistics_of_whole_sequences_are_refused_with_a_cache(mode: str) -> None:
    model, tokens = measured(statistics="prefix", eval_statistics=mode), ids()
    with pytest.raises(UserError, match=f"statistics='{mode}' measure whole sequences"):
        generated(model, tokens)
    assert generated(model, tokens, use_cache=False).shape == (2, 15)


def test_generation_in_training_mode_is_told_to_call_eval() -> None:
    model = measured(statistics="prefix").train()
    with pytest.raises(UserError, match=r"in training mode .* call model\.eval\(\) before"):
        generated(model, ids())


def test_prefix_statistics_stand_behind_the_keys_of_a_growing_cache() -> None:
    model, tokens = measured(statistics="prefix"), ids(2, 8)
    whole = logits(model, input_ids=tokens)
    cache = DynamicCache()  # grows by a layer at a time: a slot in between would be taken for one
    with torch.no_grad():
        model(input_ids=tokens[:, :5], past_key_values=cache)
        rest = model(input_ids=tokens[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 5:], **CLOSE)
    assert len(cache.layers) == 5
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    more = logits(model, input_ids=tokens[:, :1].flip(0), past_key_values=cache)
    both = logits(model, input_ids=torch.cat([tokens, tokens[:, :1]], 1))
    torch.testing.assert_close(more[:, 0], both.flip(0)[:, -1], **CLOSE)


def test_an_offloading_cache_fetches_its_first_layer_in_place_of_the_statistics() -> None:
    """After the last layer it prefetches the next one, round to the first. Streams need a GPU, so
    the cache begins to offload when it is filled, and the stream is none."""
    model, tokens = measured(statistics="prefix"), ids(2, 8)
    cache = DynamicCache()
    cache.offloading, cache.only_non_sliding = False, True
    fetched: list[int] = []
    with torch.no_grad():
        handle = model.model.norm.register_forward_hook(
            lambda *call: setattr(cache, "offloading", True)
        )
        model(input_ids=tokens, past_key_values=cache)
        handle.remove()
    for place, layer in enumerate(cache.layers[:4]):
        layer.prefetch = lambda place=place: fetched.append(place)
    cache.prefetch_stream = contextlib.nullcontext()
    for place in range(4):
        cache.prefetch(place + 1)
    assert fetched == [1, 2, 3, 0]


@pytest.mark.parametrize("mode", ["batch", "sequence", "prefix"])
def test_continuous_batching_is_refused_for_statistics_of_the_call(mode: str) -> None:
    model = measured(statistics="prefix", eval_statistics=mode)
    with pytest.raises(UserError, match="generate_batch puts new tokens of several sequences"):
        logits(model, input_ids=ids(1, 8), cache=object())


def test_a_cache_without_the_statistics_of_its_tokens_is_refused() -> None:
    model, tokens = measured(statistics="prefix"), ids(2, 6)
    cache = model(input_ids=tokens).past_key_values  # gradients were recorded
    with pytest.raises(UserError, match="holds 6 tokens without their prefix statistics"):
        logits(model, input_ids=tokens[:, :1], past_key_values=cache)
    with torch.no_grad():
        cache = model(input_ids=tokens).past_key_values
    with pytest.raises(UserError, match="filled for 2 sequences, and this call has 1"):
        logits(model, input_ids=tokens[:1, :1], past_key_values=_for_one(cache))


def _for_one(cache: DynamicCache) -> DynamicCache:
    """The cache with keys of its first sequence alone, and the statistics of both."""
    for layer in cache.layers[:4]:
        layer.batch_select_indices(torch.tensor([0]))
    return cache


def test_a_cache_that_inference_mode_filled_is_continued_outside_of_it() -> None:
    model, tokens = measured(statistics="prefix"), ids(2, 8)
    whole = logits(model, input_ids=tokens)
    with torch.inference_mode():
        cache = model(input_ids=tokens[:, :5]).past_key_values
    for start, end in ((5, 7), (7, 8)):
        rest = logits(model, input_ids=tokens[:, start:end], past_key_values=cache)
        torch.testing.assert_close(rest, whole[:, start:end], **CLOSE)
