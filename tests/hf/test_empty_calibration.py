"""A batch without a token to measure, or with NaN, is refused by its number."""

import pytest
import torch
from attached import ids, statistics
from small_models import build

import acmoe
from acmoe import UserError


def averages(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for one in statistics(model) for tensor in (one.dispersion, one.weight)]


def test_a_batch_of_padding_alone_is_refused_by_its_number() -> None:
    model = acmoe.attach(build("mixtral"))
    padding = {"input_ids": ids(), "attention_mask": torch.zeros_like(ids())}
    with pytest.raises(UserError, match=r"batches: number 1 is padding alone.*leave it out"):
        acmoe.calibrate(model, [padding])
    assert not any(tensor.any() for tensor in averages(model))
    with pytest.raises(UserError, match="batches: number 3 is padding alone"):
        acmoe.calibrate(model, [ids(seed=1), ids(seed=2), padding, ids(seed=3)])
    # The batches before it have counted.
    other = acmoe.calibrate(acmoe.attach(build("mixtral")), [ids(seed=1), ids(seed=2)])
    assert all(map(torch.equal, averages(model), averages(other)))


def test_a_mask_of_four_dimensions_is_not_taken_for_padding() -> None:
    """Its zeros are added to the scores of attention, so that every token is visible."""
    model, tokens = acmoe.attach(build("mixtral")), ids()
    mask = torch.zeros(len(tokens), 1, tokens.shape[1], tokens.shape[1])
    with pytest.raises(UserError, match=r"from which padding cannot be read.*pass a 2-D mask"):
        acmoe.calibrate(model, [{"input_ids": tokens, "attention_mask": mask}])


def test_tokens_of_which_no_expert_gets_two_are_not_taken_for_a_calibration() -> None:
    one, two = (ids(1, length) for length in (1, 2))
    two[:, 1] = two[:, 0]  # the same token twice chooses the same expert
    model = acmoe.attach(build("mixtral"))
    with pytest.raises(UserError, match="in none of 2 two tokens have the same first"):
        acmoe.calibrate(model, [one, one])
    assert not any(tensor.any() for tensor in averages(model))
    acmoe.calibrate(model, [one, two])
    assert any(tensor.any() for tensor in averages(model))


def test_a_batch_for_which_the_model_gives_nan_is_refused_by_its_number() -> None:
    model, good = acmoe.attach(build("mixtral")).eval(), torch.randn(2, 10, 32)
    broken = good.clone()
    broken[0, 4] = torch.nan  # attention carries it to all 10 tokens of its row, as 0 * NaN
    with pytest.raises(UserError, match=r"gives NaN for 10 of 20 tokens of number 2; look for"):
        acmoe.calibrate(model, [{"inputs_embeds": good}, {"inputs_embeds": broken}])
    other = acmoe.calibrate(acmoe.attach(build("mixtral")), [{"inputs_embeds": good}])
    assert all(map(torch.equal, averages(model), averages(other)))


def test_nan_in_the_logits_of_padding_is_no_reason_to_refuse_a_batch() -> None:
    model, inputs = acmoe.attach(build("mixtral")).eval(), {"inputs_embeds": torch.randn(2, 10, 32)}
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 4:] = True
    model.lm_head.register_forward_hook(
        lambda module, args, logits: logits.masked_fill(padding[..., None], torch.nan)
    )
    with pytest.raises(UserError, match="gives NaN for 6 of 20 tokens of number 1"):
        acmoe.calibrate(model, [inputs])
    acmoe.calibrate(model, [{**inputs, "attention_mask": (~padding).long()}])
    assert any(tensor.any() for tensor in averages(model))
