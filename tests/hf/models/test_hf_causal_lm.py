"""The language model as a transformers model: loading, loss, recomputation, outputs."""

import json
import math

import pytest
import torch
from hf_cases import language_model, same_state, wrapped

from acmoe.errors import UserError

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402, after importorskip

from acmoe.hf import AcmoeConfig, AcmoeForCausalLM  # noqa: E402


def test_saved_in_shards_and_loaded_all_bits_are_the_same(pair, prompts, tmp_path):
    model, ours = pair
    ours.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is AcmoeForCausalLM
    assert same_state(loaded, ours)
    assert any("dispersion" in name for name in loaded.state_dict())
    with torch.no_grad():
        logits = loaded(prompts).logits
        assert torch.equal(logits, model(prompts).logits)
    # A statistic that the checkpoint does not hold is as in a new model.
    fresh = dict(loaded.named_non_persistent_buffers())
    pending = [buffer for name, buffer in fresh.items() if ".last_" in name]
    assert pending
    assert all(int(buffer.count_nonzero()) == 0 for buffer in pending)


def test_an_attribute_that_was_set_by_hand_is_named_when_the_model_is_saved(tmp_path):
    ours = wrapped(language_model("adaptive"))
    ours.model.moe_layers()[0].capacity_factor = 1.25
    says = r"capacity_factor=1\.25, not None \(1 in all\); set them again after loading"
    with pytest.warns(UserWarning, match=says):
        ours.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same_state(loaded, ours) and loaded.model.moe_layers()[0].capacity_factor is None
    (tmp_path / "config.json").unlink()
    loaded.save_pretrained(tmp_path, True, loaded.state_dict())  # without a warning
    assert (tmp_path / "config.json").is_file()


def test_bfloat16_weights_keep_float32_statistics(pair, tmp_path):
    _, ours = pair
    ours.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in loaded.buffers()} == {torch.float32}
    stored = ours.state_dict()
    for name, value in loaded.state_dict().items():
        if "statistics" in name:
            assert torch.equal(value, stored[name])


def test_all_fields_of_the_config_are_stored(pair, tmp_path):
    model, ours = pair
    ours.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "acmoe"
    assert stored["model"]["router"]["measure"] == "mad"  # a default, written out
    assert AcmoeConfig.from_pretrained(tmp_path).library == model.config


def test_the_loss_is_that_of_the_shifted_labels_plus_the_auxiliary_loss(pair, prompts):
    model, ours = pair
    labels = prompts.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        found = ours(prompts, labels=labels)
        plain = model(prompts).logits
    logits = plain.double()
    nats = [
        -float(logits[row, place].log_softmax(-1)[labels[row, place + 1]])
        for row in range(2)
        for place in range(11)
        if labels[row, place + 1] != -100
    ]
    assert len(nats) == 11 + 8
    expected = math.fsum(nats) / len(nats) + float(found.aux_loss)
    assert float(found.aux_loss) > 0
    assert float(found.loss) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(found.logits, plain)


@pytest.mark.parametrize("masked", [True, False], ids=["attention_mask", "padding id"])
def test_padding_between_the_tokens_of_a_text_is_refused(pair, prompts, masked):
    mask = torch.ones_like(prompts)
    mask[1, 4] = 0
    given = {"attention_mask": mask} if masked else {}
    ids = prompts if masked else prompts.masked_fill(mask == 0, 256)
    with pytest.raises(UserError, match=r"attention_mask has padding between the tokens of row 1"):
        pair[1](ids, **given)


def test_the_loss_is_the_same_with_padding_on_either_side(pair, prompts):
    _, ours = pair
    losses = []
    for side in ("left", "right"):
        ids, mask, labels = prompts.clone(), torch.ones_like(prompts), prompts.clone()
        place = slice(None, 5) if side == "left" else slice(7, None)
        ids[1, 5:] = prompts[1, :7]
        ids[1] = ids[1] if side == "left" else ids[1].roll(-5)
        labels[1] = ids[1]
        ids[1, place], mask[1, place], labels[1, place] = 256, 0, -100
        with torch.no_grad():
            losses.append(float(ours(ids, attention_mask=mask, labels=labels).loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_micro_batches_of_a_step_add_up_to_the_whole(pair, prompts):
    _, ours = pair
    labels = prompts.clone()
    labels[0, :7] = -100  # 5 labels that count in one row, 11 in the other
    with torch.no_grad():
        parts = [
            ours(prompts[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=16)
            for row in range(2)
        ]
        rows = [ours(prompts[row : row + 1], labels=labels[row : row + 1]) for row in range(2)]
    expected = (5 * float(rows[0].loss) + 11 * float(rows[1].loss)) / 16
    assert float(parts[0].loss + parts[1].loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("no_native")
def test_recomputed_blocks_give_the_same_gradients_and_no_logits(prompts):
    ours = wrapped(language_model(dropout=0.0)).train()
    gradients = []
    for recompute in (False, True):
        if recompute:
            ours.gradient_checkpointing_enable()
            assert ours.is_gradient_checkpointing
            assert ours.model.checkpoint_blocks
        ours.zero_grad()
        found = ours(prompts, labels=prompts)
        assert found.logits is None  # never those of the whole vocabulary at one time
        found.loss.backward()
        # `norm_idle`, which the published model has and does not use, gets none.
        found = {n: p.grad.clone() for n, p in ours.named_parameters() if p.grad is not None}
        gradients.append(found)
    plain, recomputed = gradients
    assert len(plain) > 20
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    ours.gradient_checkpointing_disable()
    assert not ours.model.checkpoint_blocks
    with pytest.raises(UserError, match="every_n_layers=2"):
        ours.gradient_checkpointing_enable(every_n_layers=2)


def test_router_logits_are_the_affinities_of_each_layer(pair, prompts):
    model, ours = pair
    with torch.no_grad():
        found = ours(prompts, output_router_logits=True).router_logits
        expected = model(prompts, return_routings=True).routings
    assert [layer.shape for layer in found] == [(24, 8), (24, 8)]
    assert all(torch.equal(a, b.affinity) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def test_hidden_states_are_the_inputs_of_the_blocks_and_of_the_output_layer(pair, prompts):
    model, ours = pair
    plain = ours(prompts)
    assert plain.hidden_states is None
    found = ours(prompts, output_hidden_states=True)
    assert len(found.hidden_states) == len(model.blocks) + 1
    assert torch.equal(found.hidden_states[0], model.embed(prompts))
    assert torch.equal(model.unembed(found.hidden_states[-1]), plain.logits)
    seen = []  # the output of the first block is the input of the second
    handle = model.blocks[0].register_forward_hook(lambda _, given, made: seen.append(made[0]))
    ours(prompts)
    handle.remove()
    assert torch.equal(found.hidden_states[1], seen[0])
    assert not any(block._forward_pre_hooks for block in model.blocks)
    try:
        ours.config.output_hidden_states = True
        assert all(map(torch.equal, ours(prompts).hidden_states, found.hidden_states))
        assert ours(prompts, output_hidden_states=False).hidden_states is None
        made = ours.generate(prompts, max_new_tokens=2, do_sample=False)
    finally:
        ours.config.output_hidden_states = False
    assert torch.equal(made, ours.generate(prompts, max_new_tokens=2, do_sample=False))


@torch.no_grad()
def test_position_ids_are_taken_where_they_are_the_usual_ones(pair, prompts):
    _, ours = pair
    usual = torch.arange(12)[None]
    assert torch.equal(ours(prompts, position_ids=usual).logits, ours(prompts).logits)
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0  # padding on the left, whose ids are not read
    padded = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    given = {"attention_mask": mask, "use_cache": True}
    found = ours(prompts, position_ids=padded, **given)
    assert torch.equal(found.logits, ours(prompts, **given).logits)
    cache, longer = found.past_key_values, torch.nn.functional.pad(mask, (0, 1), value=1)
    with pytest.raises(UserError, match="position_ids do not count the tokens of each text from 0"):
        ours(prompts[:, :1], longer, cache, position_ids=torch.tensor([[12], [12]]))
    ours(prompts[:, :1], longer, cache, position_ids=torch.tensor([[9], [12]]))
    packed = torch.tensor([[*range(5), *range(7)]] * 2)  # two texts in one row
    for wrong in (packed, usual[:, :5], usual[0], usual + 1):
        with pytest.raises(UserError, match="leave position_ids out"):
            ours(prompts, position_ids=wrong)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(
        ours.generate(prompts, position_ids=usual.expand(2, -1), **options),
        ours.generate(prompts, **options),
    )


def test_ids_outside_the_vocabulary_are_a_mistake(pair):
    with pytest.raises(UserError, match="input_ids"):
        pair[1](torch.tensor([[1, 300]]))


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        ((4,), torch.long, r"input_ids have shape \(4,\); pass at least one id"),
        ((0, 4), torch.long, r"input_ids have shape \(0, 4\); pass at least one id"),
        ((1, 4), torch.float32, r"input_ids are torch.float32; pass whole numbers"),
    ],
)
def test_input_that_is_no_batch_of_ids_is_a_mistake(pair, shape, dtype, says):
    with pytest.raises(UserError, match=says):
        pair[1](torch.ones(shape, dtype=dtype))


def test_labels_that_are_no_ids_are_a_mistake(pair, prompts):
    with pytest.raises(UserError, match=r"labels are torch\.float32; give whole numbers"):
        pair[1](prompts, labels=prompts.float())
    with pytest.raises(UserError, match=r"tokens are torch\.float32; pass whole numbers"):
        pair[0](prompts.float())


@pytest.mark.usefixtures("poisoned_empty")
def test_nothing_that_was_loaded_is_left_unwritten(pair, tmp_path):
    """from_pretrained builds on the meta device; `torch.empty` is NaN in this test."""
    pair[1].save_pretrained(tmp_path)
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert head.head.weight.shape == (3, 16)  # not in the checkpoint: drawn anew
    assert head.head.weight.count_nonzero() == 48
    for tensor in (*head.parameters(), *head.buffers()):
        assert bool(tensor.isfinite().all())
    stored = pair[1].state_dict()
    assert all(torch.equal(head.state_dict()[name], value) for name, value in stored.items())
    scale = [value for name, value in head.named_buffers() if name.endswith("running_scale")]
    assert scale
    assert all(bool((value == 1).all()) for value in scale)


def test_a_new_bfloat16_model_has_float32_statistics(pair):
    new = AutoModelForCausalLM.from_config(pair[1].config, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in new.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in new.buffers()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("router", ["smoe", "cosine", "stable", "metric", "random"])
def test_every_router_loads_bitwise(router, prompts, tmp_path):
    model = language_model(router)
    if router == "stable":
        for layer in model.moe_layers():
            layer.router.freeze()  # a stage that is no tensor of its own
    ours = wrapped(model)
    ours.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same_state(loaded, ours)
    if router != "random":
        with torch.no_grad():
            assert torch.equal(loaded(prompts).logits, model(prompts).logits)
