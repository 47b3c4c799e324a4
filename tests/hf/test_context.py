"""The context of a layer's call: hooks find it, whichever of them are compiled."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Barrier
from typing import Any

import pytest
import torch
from attached import ids, logits
from small_models import build

import acmoe
from acmoe import UserError
from acmoe.hf.adaptive import AdaptivePart, LayerContext
from acmoe.hf.contexts import close_context, context_of, open_context
from acmoe.hf.parts import attached_parts
from acmoe.hf.tape import Tape

OUTSIDE = "was called outside of its decoder layer"


@pytest.fixture
def part() -> AdaptivePart:
    return next(iter(attached_parts(acmoe.attach(build("mixtral"))).values()))


def new_context() -> LayerContext:
    return LayerContext(Tape(gradient=False), 2, 3)


def test_a_router_finds_the_present_call_whichever_hooks_are_compiled(
    part: AdaptivePart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls, each of which opens, reads and closes a context in compiled code or not."""
    for flags in product((False, True), repeat=6):
        for at_open, at_read, at_close in (flags[:3], flags[3:]):
            context = new_context()
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda flag=at_open: flag)
            open_context(part, context)
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda flag=at_read: flag)
            assert context_of(part) is context
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda flag=at_close: flag)
            close_context(part)
            for flag in (False, True):
                monkeypatch.setattr(torch.compiler, "is_compiling", lambda flag=flag: flag)
                with pytest.raises(UserError, match=OUTSIDE):
                    context_of(part)


def test_a_call_that_was_interrupted_leaves_nothing_behind(part: AdaptivePart) -> None:
    open_context(part, new_context())  # Ctrl-C: no hook closes it
    context = new_context()
    open_context(part, context)
    assert context_of(part) is context and part.context is context
    close_context(part)
    assert part.context is None


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_model_is_copied_without_the_call_that_was_interrupted(
    copied: Callable[[Any], Any],
) -> None:
    """In a router's call the context has the router's input, which is no leaf of autograd."""
    model: Any = acmoe.attach(build("mixtral"))
    hook = model.model.layers[1].mlp.gate.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=ids())
    hook.remove()
    assert any(part.context is not None for part in attached_parts(model).values())
    other = copied(model)
    assert all(part.context is None for part in attached_parts(other).values())
    assert torch.equal(logits(other, input_ids=ids()), logits(model, input_ids=ids()))


def test_threads_have_contexts_of_their_own_and_compiled_code_none(
    part: AdaptivePart, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = new_context(), new_context()
    open_context(part, mine)
    with ThreadPoolExecutor(1) as other:
        other.submit(open_context, part, theirs).result()
        assert context_of(part) is mine
        assert other.submit(context_of, part).result() is theirs
        close_context(part)
        assert other.submit(context_of, part).result() is theirs
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(UserError, match="several threads call a model of which a part"):
            context_of(part)
        monkeypatch.undo()
        other.submit(close_context, part).result()
    with pytest.raises(UserError, match=OUTSIDE):
        context_of(part)


@pytest.mark.parametrize("first", ["mine", "theirs"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_compiled_code_finds_the_call_again_after_threads_overlapped(
    part: AdaptivePart, monkeypatch: pytest.MonkeyPatch, first: str, interrupted: bool
) -> None:
    """Interrupted: the other thread ends in the middle of its call, and no hook closes that."""
    with ThreadPoolExecutor(1) as other:
        if first == "theirs":
            other.submit(lambda: open_context(part, new_context())).result()
        open_context(part, new_context())
        if first == "mine":
            other.submit(lambda: open_context(part, new_context())).result()
        if not interrupted:
            other.submit(close_context, part).result()
    close_context(part)
    assert part.context is None or interrupted
    context = new_context()
    open_context(part, context)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert context_of(part) is context
    monkeypatch.undo()
    close_context(part)
    assert part.context is None


def test_three_threads_share_a_layer_until_one_is_left(
    part: AdaptivePart, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = [ThreadPoolExecutor(1) for _ in range(3)]
    for thread in threads:
        thread.submit(open_context, part, new_context()).result()
    for thread in threads[:2]:
        thread.submit(close_context, part).result()
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(UserError, match="several threads call a model"):
            context_of(part)
        monkeypatch.undo()
    threads[2].submit(close_context, part).result()
    assert part.context is None
    for thread in threads:
        thread.shutdown()


def test_a_model_that_two_threads_called_at_once_is_compiled_in_part_afterwards() -> None:
    """Both threads wait for each other inside the second layer."""
    model: Any = acmoe.attach(build("mixtral")).eval()
    expected = logits(model, input_ids=ids())
    both = Barrier(2, timeout=60)

    def meet(*_: object) -> None:
        both.wait()

    hook = model.model.layers[1].mlp.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(logits, model, input_ids=ids()) for _ in range(2)]
        for one in found:
            assert torch.equal(one.result(), expected)
    hook.remove()
    assert all(part.context is None for part in attached_parts(model).values())
    for layer in model.model.layers:
        layer.mlp.gate.compile(backend="eager")
    assert torch.equal(logits(model, input_ids=ids()), expected)
