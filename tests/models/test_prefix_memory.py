"""Prefix statistics continue from segment to segment with the memory of a stream.

So a text gives the same numbers however it is cut: whole, in blocks, or token by token.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acmoe import AdaptiveConfig
from acmoe.analyze.observe import observed
from acmoe.config.text.language import LanguageConfig
from acmoe.evaluate.language import score_stream
from acmoe.evaluate.run import open_corpus
from acmoe.fast import accelerate
from acmoe.fast.memory import StaticMemory
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.memory import Memory
from acmoe.ops.statistics.prefix import PrefixMoments
from acmoe.routing.statistics.cache import CarriedMoments
from acmoe.routing.statistics.step import fold_statistics
from acmoe.train.text import TextTrainer
from tiny_runs import byte_corpus, tiny_run

CONFIG = LanguageConfig(
    vocab_size=11,
    dim=16,
    heads=2,
    hidden=8,
    repeats=3,
    span=10,
    block=4,
    num_experts=4,
    dropout=0.0,
    router=AdaptiveConfig(statistics="prefix", prior_tokens=4.0),
)


def model_of(*, fast: bool = False, **changes: Any) -> LanguageModel:
    """A float64 model whose running averages, the prior of prefix statistics, are not empty."""
    torch.manual_seed(0)
    model = LanguageModel(replace(CONFIG, **changes)).double()
    ids = tokens(2, 24)
    model(ids, ids)
    fold_statistics(model)
    return accelerate(model).eval() if fast else model.eval()  # type: ignore[return-value]


def tokens(streams: int, length: int) -> Tensor:
    return torch.randint(11, (streams, length), generator=torch.Generator().manual_seed(1))


def in_segments(model: LanguageModel, ids: Tensor, cuts: list[int]) -> tuple[Tensor, Memory]:
    """The logits of a text that is read in segments of these lengths."""
    memory, logits = None, []
    for segment in ids.split(cuts, dim=1):
        out = model(segment, memory=memory)
        logits.append(out.logits)
        memory = out.memory
    assert memory is not None
    return torch.cat(logits, dim=1), memory


@pytest.mark.parametrize(
    ("fast", "norm", "mix"), [(False, "post", 1), (True, "post", 1), (True, "pre", 2)]
)
@torch.no_grad()
def test_a_text_gives_the_same_logits_however_it_is_cut(fast: bool, norm: str, mix: int) -> None:
    router = AdaptiveConfig(statistics="prefix", prior_tokens=4.0, mix=mix)
    model, ids = model_of(fast=fast, norm=norm, router=router), tokens(3, 24)
    whole, after_whole = in_segments(model, ids, [24])
    halves, after = in_segments(model, ids, [12, 12])
    torch.testing.assert_close(halves, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(in_segments(model, ids, [1, 5, 2, 16])[0], whole, rtol=1e-9, atol=0)
    moments = [one for one in after.moments if one is not None]
    expected = [one for one in after_whole.moments if one is not None]
    assert len(moments) == 2  # the first of three MoE layers has no clusters
    torch.testing.assert_close(moments, expected, rtol=1e-9, atol=1e-9)
    # Each of a stream's 24 tokens is in one cluster.
    assert all(torch.equal(one.tokens.sum(1), 24 * torch.ones(3).double()) for one in moments)
    # Without the moments the second half would start with no tokens: other numbers.
    first = model(ids[:, :12]).memory
    forgetful = model(ids[:, 12:], memory=first._replace(moments=())).logits
    assert (forgetful - whole[:, 12:]).abs().max() > 1e-3


@torch.no_grad()
def test_decoding_token_by_token_gives_the_same_logits() -> None:
    model, ids = model_of(), tokens(2, 20)
    cache = model.new_cache(2)
    decoded = []
    for token in ids.split(1, dim=1):
        x, _, _ = model.hidden_states(token, cache=cache)
        decoded.append(model.unembed(x))
    halves, _ = in_segments(model, ids, [8, 12])
    torch.testing.assert_close(torch.cat(decoded, dim=1), halves, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_the_scale_of_every_token_is_that_of_one_long_segment() -> None:
    model, ids = model_of(), tokens(2, 16)
    layers = model.moe_layers()
    with observed(layers) as whole:
        model(ids)
    with observed(layers) as halves:
        in_segments(model, ids, [6, 10])
    for depth, layer in enumerate(layers):
        parts = [one for one in halves if one.layer is layer]
        scale = torch.cat([one.scale.view(2, -1, 16) for one in parts], dim=1)
        torch.testing.assert_close(scale, whole[depth].scale.view(2, 16, 16))


def test_the_evaluation_loss_does_not_depend_on_the_block() -> None:
    model = model_of()
    stream = tokens(1, 131)[0].numpy().astype(np.uint16)
    losses = [score_stream(model, stream, batch=2, block=block).loss for block in (4, 16, 64)]
    assert max(losses) - min(losses) < 1e-9


def test_streams_keep_their_own_moments_and_padding_adds_none() -> None:
    model, ids = model_of(), tokens(2, 12)
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    with torch.no_grad():
        both = model(ids, token_mask=mask).memory
        alone = model(ids[1:, :7]).memory
    for one, other in zip(both.moments[1:], alone.moments[1:], strict=True):
        assert one is not None and other is not None
        for found, expected in zip(one, other, strict=True):
            torch.testing.assert_close(found[1:], expected)


def test_a_stream_of_any_length_keeps_counting() -> None:
    slot = CarriedMoments()
    few, many = 2.0**20, 2.0**20 + 2
    spread = torch.tensor([[[3 * few], [3 * many]]])
    slot.store(PrefixMoments(torch.tensor([[few, many]]), torch.ones(1, 2, 1), spread))
    assert slot.after is not None
    assert slot.after.tokens.tolist() == [[few, 2.0**19 + 1]]
    assert torch.equal(slot.after.spread[..., 0], 3 * slot.after.tokens)  # dispersion 3 as before
    assert slot.after.mean.eq(1).all()


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_other_statistics_carry_nothing(statistics: Any) -> None:
    model = model_of(router=AdaptiveConfig(statistics=statistics))
    assert model(tokens(2, 8)).memory.moments == ()


def test_training_detaches_the_moments_and_recomputes_with_the_same() -> None:
    router = AdaptiveConfig(statistics="prefix", detach=False)
    ids = tokens(2, 12)
    found = []
    for checkpoint in (False, True):
        model = model_of(router=router).train()
        model.checkpoint_blocks = checkpoint
        first = model(ids[:, :6], ids[:, :6]).memory
        out = model(ids[:, 6:], ids[:, 6:], memory=first)
        assert not any(part.requires_grad for one in out.memory.moments for part in one or ())
        assert out.loss is not None
        out.loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(
            [out.loss.detach(), *gradients, *(m for one in out.memory.moments for m in one or ())]
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_static_memory_keeps_the_moments_in_place() -> None:
    model, ids = model_of(fast=True), tokens(2, 32)
    free = in_segments(model, ids[:, :12], [4, 4, 4])[1]
    place = StaticMemory(free._replace(moments=()), 4, torch.float64)  # as from an old checkpoint
    held = place.hold(free)
    addresses = [part.data_ptr() for one in held.moments for part in one or ()]
    assert addresses and addresses[0] != free.moments[1].tokens.data_ptr()  # type: ignore[union-attr]
    for segment in ids[:, 12:].split(4, dim=1):
        with torch.no_grad():
            found, expected = model(segment, memory=held), model(segment, memory=free)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-12, atol=1e-12)
        free, held = expected.memory, place.hold(found.memory)
        assert [part.data_ptr() for one in held.moments for part in one or ()] == addresses
    place.hold(free._replace(moments=()))  # streams that begin anew
    assert not any(part.any() for one in place.moments for part in one or ())


def test_a_resumed_run_has_the_moments_and_an_old_one_starts_without(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "model.router.statistics=prefix", "steps=6")
    corpus = open_corpus(config.data)

    def trainer() -> TextTrainer:
        torch.manual_seed(0)
        return TextTrainer(config, corpus, torch.device("cpu"))

    run = trainer()
    for step in range(1, 4):
        run.update(step, record=False)
    tensors = {name: value.clone() for name, value in run.state_tensors().items()}
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    position = run.batches.state_dict()
    assert tensors["moments/1/2/mean"].shape == (2, 4, 16)
    # 3 blocks of 16 tokens, 2 streams in each of the 2 micro-batches.
    assert tensors["moments/1/2/tokens"].sum(1).tolist() == [48.0, 48.0]
    expected = [run.update(step, record=False).loss for step in (4, 5)]

    def resumed(saved: dict[str, Tensor]) -> list[Tensor]:
        again = trainer()
        again.model.load_state_dict(weights)
        again.batches.load_state_dict(position)
        again.load_state_tensors(saved)
        return [again.update(step, record=False).loss for step in (4, 5)]

    assert torch.equal(torch.stack(resumed(tensors)), torch.stack(expected))
    old = {name: value for name, value in tensors.items() if not name.startswith("moments/")}
    assert not torch.equal(torch.stack(resumed(old)), torch.stack(expected))
