"""The fast runner holds memory in the precision that reads it: half the bytes, equal numbers."""

from dataclasses import replace

import pytest
import torch

from acmoe.config.text.language import LanguageConfig
from acmoe.fast import accelerate
from acmoe.models.text.decoder import LanguageModel, LanguageOutput
from acmoe.models.text.memory import Memory

CONFIG = LanguageConfig(
    vocab_size=11, dim=8, heads=2, hidden=8, repeats=2, span=6, block=4, num_experts=4, dropout=0.0
)


def segments() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (3, 9), generator=generator)
    return ids[:, :4], ids[:, 4:]


def read(model: LanguageModel, ids: torch.Tensor, memory: Memory | None = None) -> LanguageOutput:
    with torch.autocast("cpu", torch.bfloat16):
        out: LanguageOutput = model(ids, ids, memory=memory)
    return out


@pytest.mark.parametrize(("norm", "held"), [("post", torch.bfloat16), ("pre", torch.float32)])
def test_memory_is_what_the_block_s_first_reader_wants(norm: str, held: torch.dtype) -> None:
    """Products want bfloat16 under autocast; a norm before them wants all bits."""
    torch.manual_seed(0)
    model = LanguageModel(replace(CONFIG, norm=norm))  # type: ignore[arg-type]
    accelerate(model)
    first, _ = segments()
    assert {kept.dtype for kept in read(model, first).memory.hidden} == {held}
    assert {kept.dtype for kept in model(first).memory.hidden} == {torch.float32}


def test_a_wide_memory_gives_the_same_bits() -> None:
    """As a checkpoint of an earlier version holds it."""
    torch.manual_seed(0)
    model = LanguageModel(CONFIG)
    accelerate(model)
    first, second = segments()
    memory = read(model, first).memory
    wide = Memory(tuple(kept.float() for kept in memory.hidden))
    found = []
    for past in (memory, wide):
        model.zero_grad()
        out = read(model, second, past)
        assert out.loss is not None
        out.loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([out.loss, *out.memory.hidden, *gradients])
    assert len(found[0]) > 20
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
