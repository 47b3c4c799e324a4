"""Attached models whose layers are sharded by FSDP2, in one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import ids, logits, measured, statistics
from small_models import build
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import MixtralForCausalLM

import acmoe

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.usefixtures("group")
def test_mixed_precision_of_fsdp_computes_what_a_bfloat16_model_computes() -> None:
    model, whole = sharded(measured(), mp_policy=BF16), measured().to(torch.bfloat16)
    whole.model.rotary_emb = measured().model.rotary_emb  # FSDP does not cast buffers
    assert torch.equal(logits(model, input_ids=ids()), logits(whole, input_ids=ids()))
    for one in (model, whole):
        one.train()(input_ids=ids(4, 24), labels=ids(4, 24)).loss.backward()
        torch.optim.SGD(one.parameters(), lr=0.0).step()
    before = statistics(measured())
    for found, expected, old in zip(statistics(model), statistics(whole), before, strict=True):
        assert torch.equal(found.dispersion, expected.dispersion)
        assert not torch.equal(found.dispersion, old.dispersion)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("first", ["attach", "fully_shard"])
def test_detach_gives_back_the_class_that_is_sharded(first: str) -> None:
    model = build("mixtral")
    for step in (acmoe.attach, sharded) if first == "attach" else (sharded, acmoe.attach):
        model = step(model)
    assert type(model).__name__ == "FSDPAdaptiveMixtralForCausalLM"
    acmoe.detach(model)
    assert isinstance(model, FSDPModule) and isinstance(model, MixtralForCausalLM)
    assert type(model).__name__ == "FSDPMixtralForCausalLM"
    assert torch.equal(logits(model, input_ids=ids()), logits(build("mixtral"), input_ids=ids()))
