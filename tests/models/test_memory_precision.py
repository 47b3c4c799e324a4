"""Memory is held in the precision that reads it: half the bytes, and not another number."""

from dataclasses import replace

import pytest
import torch

from acmoe.config.text.language import LanguageConfig
from acmoe.models.text.decoder import LanguageModel, LanguageOutput, Memory

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
    first, _ = segments()
    assert {kept.dtype for kept in read(model, first).memory.hidden} == {held}
    assert {kept.dtype for kept in model(first).memory.hidden} == {torch.float32}


def test_a_wide_memory_gives_the_same_bits() -> None:
    """As a checkpoint of an earlier version holds it."""
    torch.manual_seed(0)
    model = LanguageModel(CONFIG)
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


def test_the_gradient_is_that_of_keys_and_values_over_a_joined_tensor() -> None:
    """In float64, by the plain form: every product over memory and segment, memory a constant."""
    torch.manual_seed(0)
    model = LanguageModel(CONFIG).double()
    first, second = segments()
    memory = model(first).memory
    block = model.blocks[0]
    x = model.embed(second).detach().requires_grad_()
    past = memory.hidden[0]
    joined = torch.cat([past, x], dim=1)
    wanted = block.attention(joined, 5, table=model.positions)
    found = block.attention(joined.detach(), 5, table=model.positions, segment=x)
    torch.testing.assert_close(found, wanted)
    weight = torch.randn(found.shape, dtype=torch.float64)
    both = [(out * weight).sum() for out in (found, wanted)]
    wrt = (x, *block.attention.parameters(), model.positions)
    ours, plain = (torch.autograd.grad(loss, wrt, retain_graph=True) for loss in both)
    for got, right in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, right)
