"""`acmoe.detach` takes everything off, or says why it cannot."""

import pytest
import torch
from attached import ids, logits
from small_models import build
from transformers import MixtralForCausalLM

import acmoe
from acmoe import UserError


@pytest.mark.parametrize(
    ("family", "part"), [("mixtral", "model"), ("qwen3_vl_moe.whole", "model.language_model")]
)
def test_a_part_of_an_attached_model_is_not_detached_alone(family: str, part: str) -> None:
    """The whole would keep its class and config, and be saved without statistics."""
    model = acmoe.attach(build(family))
    with pytest.raises(UserError, match=r"is a part of an attached model.*that acmoe\.attach got"):
        acmoe.detach(model.get_submodule(part))
    acmoe.detach(model)
    assert not type(model).__name__.startswith("Adaptive")


def test_a_body_that_was_attached_alone_is_detached_by_itself_or_by_the_whole() -> None:
    model, tokens = build("mixtral"), ids()
    plain = logits(model, input_ids=tokens)
    for detached in (model.model, model):
        acmoe.calibrate(acmoe.attach(model.model), [tokens])
        acmoe.detach(detached)
        assert type(model) is MixtralForCausalLM
        assert torch.equal(logits(model, input_ids=tokens), plain)
