"""The context of a layer's call: hooks find it, whichever of them are compiled."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from attached import ids, logits
from small_models import build

import acmoe
from acmoe import UserError
from acmoe.hf.adaptive import AdaptivePart, LayerContext
from acmoe.hf.attach import attached_parts
from acmoe.hf.hooks import close_context, context_of, open_context
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
