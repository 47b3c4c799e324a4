"""What a token of the decoder depends on: earlier tokens of its sequence, and memory of them.

Shapes: B batch, L length, V words.
"""

import math

import pytest
import torch
from tiny_decoder import CAUSAL, MODERN, VOCAB, draw, trained
from torch.nn import functional as F  # noqa: N812

from acmoe.config.routing import AdaptiveConfig, RouterConfig
from acmoe.errors import UserError
from slow_cases import mostly_slow


@mostly_slow("router", CAUSAL.values(), ids=CAUSAL, keep=(0, 3))
@pytest.mark.parametrize("changes", [{}, MODERN, {"empty_memory": "zeros"}], ids=str)
def test_later_tokens_change_nothing(router: str | RouterConfig, changes: dict[str, str]) -> None:
    model, tokens = trained(router, **changes), draw(2, 3, 15)
    before = model(tokens, return_routings=True)
    for first in (1, 8, 14):
        other = tokens.clone()
        other[:, first:] = (tokens[:, first:] + 1) % VOCAB
        after = model(other, return_routings=True)
        # The experts' products group other rows, which may move the last bit.
        torch.testing.assert_close(
            after.logits[:, :first], before.logits[:, :first], rtol=1e-12, atol=1e-12
        )
        for old, new in zip(before.routings, after.routings, strict=True):
            kept_old = old.expert_ids.view(3, 15, -1)[:, :first]
            assert torch.equal(new.expert_ids.view(3, 15, -1)[:, :first], kept_old)
        assert not torch.allclose(after.logits[:, first:], before.logits[:, first:])


def test_batch_statistics_do_see_later_tokens() -> None:
    model, tokens = trained(AdaptiveConfig(statistics="batch")), draw(2, 3, 15)
    other = tokens.clone()
    other[:, 8:] = (tokens[:, 8:] + 1) % VOCAB
    assert not torch.allclose(model(other).logits[:, :8], model(tokens).logits[:, :8])


@pytest.mark.parametrize("router", CAUSAL.values(), ids=CAUSAL)
def test_other_sequences_change_nothing(router: str | RouterConfig) -> None:
    model, tokens = trained(router), draw(3, 3, 9)
    for row in range(3):
        torch.testing.assert_close(
            model(tokens[row : row + 1]).logits[0],
            model(tokens).logits[row],
            rtol=1e-12,
            atol=1e-12,
        )


@mostly_slow("cuts", [(6, 12), (1, 2, 9), (10,), (3, 4, 5, 6, 17)], ids=str, keep=(1, 3))
@pytest.mark.parametrize("changes", [{}, MODERN, {"empty_memory": "zeros"}], ids=str)
def test_segments_with_memory_equal_one_long_segment(
    cuts: tuple[int, ...], changes: dict[str, str]
) -> None:
    model, tokens = trained("adaptive", **changes), draw(4, 2, 20)
    whole = model(tokens).logits
    memory, parts = None, []
    for segment in tokens.tensor_split(cuts, dim=1):
        out = model(segment, memory=memory)
        memory = out.memory
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)


def test_memory_holds_the_last_span_inputs_without_gradient() -> None:
    model = trained()
    memory = model(draw(5, 2, 4)).memory
    assert [tuple(hidden.shape) for hidden in memory.hidden] == [(2, 4, 8)] * 4
    tokens = draw(6, 2, 5)
    after = model(tokens, memory=memory).memory
    assert [tuple(hidden.shape) for hidden in after.hidden] == [(2, 6, 8)] * 4  # span 6
    assert torch.equal(after.hidden[0][:, 1:], model.embed(tokens))
    assert torch.equal(after.hidden[0][:, :1], memory.hidden[0][:, -1:])
    assert not any(hidden.requires_grad for hidden in after.hidden)
    assert after.mask is None


def test_published_zero_slots_take_part_in_the_softmax() -> None:
    # One block, one token: all it sees are 6 slots of key and value 0, so attention gives 0 either
    # way; a second token shares its attention with 5 of them.
    masked, zeros = (trained(repeats=1, empty_memory=mode) for mode in ("masked", "zeros"))
    one, two = draw(7, 2, 1), draw(7, 2, 2)
    assert torch.equal(masked(one).logits, zeros(one).logits)
    x = masked.embed(two)
    attention, table = masked.blocks[0].attention, masked.positions
    memory = torch.zeros(2, 6, 8, dtype=torch.float64)
    q = attention.query(x)[:, 1].view(2, 2, 4)
    k = attention.key(x)[:, 0].view(2, 2, 4)
    # Positions: column 5 is the token before, columns 0 to 4 the zeros before it.
    score = q @ table
    score[..., 5] += (q * k).sum(-1)
    weight = (score / math.sqrt(4)).softmax(-1)[..., 5:]
    seen = attention.output((weight * attention.value(x)[:, 0].view(2, 2, 4)).view(2, 8))
    found = attention(x, torch.cat([memory, x], dim=1), positions=table)[:, 1]
    torch.testing.assert_close(found, seen, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(masked(two).logits[:, 1], zeros(two).logits[:, 1])


ALL_MODES = {**CAUSAL, "batch": AdaptiveConfig(statistics="batch")}


@mostly_slow("router", ALL_MODES.values(), ids=ALL_MODES, keep=(3, 4))
@mostly_slow("changes", [{}, MODERN, {"empty_memory": "zeros"}], ids=str, keep=(0, 1))
def test_padding_changes_nothing(router: str | RouterConfig, changes: dict[str, str]) -> None:
    model, tokens, targets = trained(router, **changes), draw(8, 2, 7), draw(9, 2, 7)
    plain, scored = model(tokens), model(tokens, targets)
    for left, right in ((3, 0), (0, 2), (9, 4)):
        # Padding of ids that exist nowhere: they must not even be looked up.
        padded, aim = (F.pad(ids, (left, right), value=-7) for ids in (tokens, targets))
        mask = F.pad(torch.ones_like(tokens), (left, right)).bool()
        out = model(padded, token_mask=mask)
        found = out.logits[:, left : left + 7]
        torch.testing.assert_close(found, plain.logits, rtol=1e-10, atol=1e-10)
        again = model(padded, aim, token_mask=mask)
        torch.testing.assert_close(again.loss, scored.loss, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(again.aux_loss, scored.aux_loss)
        assert torch.isfinite(out.logits).all()


def test_left_padding_stays_hidden_in_the_next_segment() -> None:
    model, tokens = trained("adaptive"), draw(10, 2, 9)
    padded = F.pad(tokens[:, :4], (3, 0), value=-7)
    mask = F.pad(torch.ones_like(tokens[:, :4]), (3, 0)).bool()
    memory = model(padded, token_mask=mask).memory
    assert memory.mask is not None and memory.mask.tolist() == [[False] * 2 + [True] * 4] * 2
    found = model(tokens[:, 4:], memory=memory).logits
    torch.testing.assert_close(found, model(tokens).logits[:, 4:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, MODERN, {"empty_memory": "zeros"}], ids=str)
def test_padding_between_tokens_is_refused_by_its_row(changes: dict[str, str]) -> None:
    model, tokens = trained(**changes), draw(11, 3, 5)
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0, 1, 0, 1, 1]]).bool()
    message = r"token_mask has padding between the tokens of row 2; pad before a stream's first"
    for more in ({}, {"targets": tokens}):
        with pytest.raises(UserError, match=message):
            model(tokens, token_mask=mask, **more)
    mask[2] = False  # a row of padding alone has no tokens to be between
    assert model(tokens, token_mask=mask).logits.isfinite().all()


def test_a_stream_that_has_ended_cannot_go_on() -> None:
    model, tokens = trained("adaptive"), draw(11, 2, 4)
    ended = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    memory = model(tokens, token_mask=ended).memory
    with pytest.raises(UserError, match=r"padding between the tokens of row 1;.*earlier segments"):
        model(tokens, memory=memory)
    # It may stay empty, and a stream may begin in a later segment.
    model(tokens, memory=memory, token_mask=torch.tensor([[True] * 4, [False] * 4]))
    begins = torch.tensor([[True] * 4, [False] * 4])
    memory = model(tokens, token_mask=begins).memory
    later = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).bool()
    found = model(tokens, memory=memory, token_mask=later)
    alone = model(tokens[1:, 1:]).logits
    torch.testing.assert_close(found.logits[1:, 1:], alone, rtol=1e-10, atol=1e-10)


def test_memory_of_other_streams_is_refused() -> None:
    model = trained()
    memory = model(draw(0, 3, 4)).memory
    with pytest.raises(UserError, match=r"memory has 4 blocks and 3 streams, this call 4 and 2"):
        model(draw(0, 2, 4), memory=memory)
