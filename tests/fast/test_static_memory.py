"""Memory that keeps its place from update to update, against memory that comes and goes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from acmoe.config.text.language import LanguageConfig
from acmoe.evaluate.run import open_corpus
from acmoe.fast import accelerate
from acmoe.fast import text as runner
from acmoe.fast.memory import StaticMemory
from acmoe.models.text.decoder import LanguageModel, LanguageOutput
from acmoe.models.text.memory import Memory, StreamMemory
from acmoe.train import graph
from acmoe.train.text import TextTrainer
from tiny_runs import byte_corpus, tiny_run

BLOCK = 4
CONFIG = LanguageConfig(
    vocab_size=11,
    dim=16,
    heads=2,
    hidden=8,
    repeats=2,
    span=12,
    block=BLOCK,
    num_experts=4,
    dropout=0.0,
)


def model_of(**changes: object) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(replace(CONFIG, **changes))  # type: ignore[arg-type]
    accelerate(model)
    return model


def read(model: LanguageModel, ids: Tensor, memory: StreamMemory | None) -> LanguageOutput:
    with torch.autocast("cpu", torch.bfloat16):
        out: LanguageOutput = model(ids, ids, memory=memory)
    return out


def full(model: LanguageModel) -> Memory:
    """Return the memory of streams that have filled their window."""
    memory = None
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        memory = read(model, torch.randint(11, (3, BLOCK), generator=generator), memory).memory
    assert memory is not None and memory.hidden[0].shape[1] == model.config.span
    return memory


def numbers(model: LanguageModel, ids: Tensor, memory: StreamMemory) -> tuple[Memory, list[Tensor]]:
    model.zero_grad()
    out = read(model, ids, memory)
    assert out.loss is not None
    out.loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return out.memory, [out.loss, *gradients]


# Three segments, one and a half, and less than one; a pre-norm block joins a tensor of its own.
@pytest.mark.parametrize(("span", "norm"), [(12, "post"), (6, "post"), (3, "post"), (12, "pre")])
def test_every_number_is_that_of_memory_that_comes_and_goes(span: int, norm: str) -> None:
    model = model_of(span=span, norm=norm)
    free = full(model)
    place = StaticMemory(free, BLOCK, free.hidden[0].dtype)
    held = place.hold(free)
    generator = torch.Generator().manual_seed(2)
    where = [hidden.data_ptr() for hidden in held.hidden]
    for _ in range(5):
        ids = torch.randint(11, (3, BLOCK), generator=generator)
        free, expected = numbers(model, ids, free)
        after, found = numbers(model, ids, held)
        held = place.hold(after)
        assert place.hold(held).hidden is held.hidden  # it is there already
        assert len(found) > 20
        for got, right in zip([*found, *held.hidden], [*expected, *free.hidden], strict=True):
            assert torch.equal(got, right)
    assert where == [hidden.data_ptr() for hidden in held.hidden]


def test_a_post_norm_model_concatenates_no_copy_of_a_static_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of()
    place = StaticMemory(full(model), BLOCK, torch.bfloat16)
    held = place.hold(full(model))
    seen: list[int] = []
    real = runner.attend

    def noted(attention: object, context: Tensor, *rest: object) -> Tensor:
        seen.append(context.data_ptr())
        return real(attention, context, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "attend", noted)
    read(model, torch.zeros(3, BLOCK, dtype=torch.int64), held)
    assert seen == [buffer.data_ptr() for buffer in held.buffers]


def test_a_backward_after_the_memory_has_moved_raises() -> None:
    model = model_of()
    place = StaticMemory(full(model), BLOCK, torch.bfloat16)
    out = read(model, torch.zeros(3, BLOCK, dtype=torch.int64), place.hold(full(model)))
    place.hold(out.memory)
    assert out.loss is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()  # type: ignore[no-untyped-call]


def test_blocks_that_are_computed_again_write_into_no_buffer() -> None:
    torch.manual_seed(0)
    model = LanguageModel(CONFIG, checkpoint_blocks=True)
    accelerate(model)
    ids = torch.zeros(3, BLOCK, dtype=torch.int64)
    place = StaticMemory(full(model), BLOCK, torch.bfloat16)
    _, expected = numbers(model, ids, full(model))
    model.zero_grad()
    out = read(model, ids, place.hold(full(model)))
    place.hold(out.memory)  # before the backward, which computes the blocks again
    assert out.loss is not None
    out.loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(*pair) for pair in zip([out.loss, *gradients], expected, strict=True))


@pytest.mark.parametrize(("length", "autocast"), [(1, True), (3, True), (BLOCK, False)])
def test_a_buffer_that_does_not_fit_a_call_is_left_alone(length: int, autocast: bool) -> None:
    model = model_of()
    free = full(model)
    held = StaticMemory(free, BLOCK, torch.bfloat16).hold(free)
    ids = torch.ones(3, length, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = (model(ids, ids, memory=memory) for memory in (held, free))
    assert torch.equal(found.loss, expected.loss)


def test_a_wider_memory_is_kept_in_the_precision_of_the_place() -> None:
    """As a checkpoint of an earlier version holds it."""
    memory = full(model_of())
    place = StaticMemory(memory, BLOCK, torch.bfloat16)
    held = place.hold(Memory(tuple(hidden.float() for hidden in memory.hidden)))
    assert all(torch.equal(*pair) for pair in zip(held.hidden, memory.hidden, strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        ("precision=bf16",),
        # tests/models/test_prefix_memory.py has a fast case of it
        pytest.param(("model.router.statistics=prefix", "model.dropout=0"), marks=pytest.mark.slow),
    ],
)
def test_updates_that_keep_memory_in_its_place_are_the_updates(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As graphs do, which a CPU cannot capture: here every update runs as it is."""
    monkeypatch.setattr(graph, "WARM_UP", 1000)
    # 20 lines are a pass of 7 blocks: memory is forgotten and filled again on the way.
    config = tiny_run(byte_corpus(tmp_path, lines=20), "split=2", "model.repeats=2", *flags)
    losses = []
    for held in (False, True):
        torch.manual_seed(0)
        trainer = TextTrainer(config, open_corpus(config.data), torch.device("cpu"))
        if held:
            trainer.graph = graph.StepGraph(trainer._step)
        losses.append([trainer.update(step, record=False).loss.item() for step in range(1, 11)])
        assert trainer.batches.passes >= 1
        assert len(trainer.places) == (2 if held else 0)
    assert losses[0] == losses[1]
