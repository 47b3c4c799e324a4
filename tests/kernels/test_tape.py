"""A tape repeats the launches of a call with other tensors, or leaves the call alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tape_cases import add_kernel, calls, expected, launch, pair, twice_plus_tail
from torch import Tensor

import acmoe
from acmoe.ops.device import tape
from acmoe.ops.device.launcher import Compiled, cdiv, compute, next_power_of_2, recorder
from acmoe.ops.device.tape import taped

pytestmark = pytest.mark.usefixtures("simulated_launches")


def test_a_second_call_repeats_the_launches_with_its_own_tensors() -> None:
    results = []
    for seed in range(3):
        found = taped(twice_plus_tail, pair(seed), (1,))
        results.append(found)
        for one, wanted in zip(found, expected(*pair(seed)), strict=True):
            assert torch.equal(one, wanted)
    assert calls == ["launched"] * 3  # those of the first call
    assert len({one.data_ptr() for found in results for one in found}) == 6  # memory of their own


def test_calls_of_another_shape_or_setting_have_tapes_of_their_own() -> None:
    taped(twice_plus_tail, pair(0), (1,))
    taped(twice_plus_tail, pair(0), (2,))
    assert len(calls) == 6


def test_each_table_of_tuned_kernels_has_tapes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tables too: a table may be written to after it was read."""
    from acmoe.ops.experts import repeated

    def key_of(table: dict[str, Any]) -> object:
        monkeypatch.setattr(repeated.tables, "user_table", lambda: table)
        return repeated._table_key()

    table: dict[str, Any] = {"a": 1}
    first = key_of(table)
    assert key_of(table) is first and len({first: 1}) == 1  # it has a hash
    assert key_of(dict(table)) != first


def test_a_tape_asks_for_the_stream_of_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter([7, 8])
    asked: list[int] = []

    def current(device: int) -> int:
        asked.append(device)
        return next(streams)

    active = SimpleNamespace(get_current_stream=current)
    monkeypatch.setattr(tape, "driver", SimpleNamespace(active=active))
    seen: list[int] = []

    def add_on_stream(*given: Any) -> None:
        seen.append(given[3])  # after the grid
        add_kernel(*given)

    def run(x: Tensor, y: Tensor) -> tuple[Tensor]:
        out = torch.empty(8)
        calls.append("launched")
        add_kernel(x, y, out, 8)
        if recorder.steps is not None:
            recorder.add(
                Compiled(add_on_stream, None, None, (), (None, None)), (1,), (x, y, out, 8)
            )
        return (out,)

    for _ in range(3):  # recorded, then repeated twice
        taped(run, pair(0), ())
    assert seen == [7, 8] and asked == [-1, -1]  # -1: the tensors are on a CPU


def test_tensors_that_are_not_aligned_or_not_contiguous_are_left_to_the_function() -> None:
    x, y = pair(0)
    taped(twice_plus_tail, (x, y), (1,))
    shifted = torch.zeros(9)[1:].copy_(x)
    assert shifted.data_ptr() % 16
    assert torch.equal(taped(twice_plus_tail, (shifted, y), (1,))[1], expected(x, y)[1])
    assert len(calls) == 6


def test_results_of_a_tape_are_as_those_of_the_function() -> None:
    for _ in range(2):  # recorded, then repeated
        for one in taped(twice_plus_tail, pair(0), (1,)):
            assert one.dtype == torch.float32 and one.is_contiguous() and one._version == 0
        with torch.inference_mode():
            assert all(one.is_inference() for one in taped(twice_plus_tail, pair(0), (1,)))
    assert len(calls) == 3


def test_a_tape_reads_what_its_tensors_hold_now_and_knows_their_dtype() -> None:
    x, y = pair(0)
    first = taped(twice_plus_tail, (x, y), (1,))[1].clone()
    x.add_(1.0)  # a weight after an optimizer step
    assert torch.equal(taped(twice_plus_tail, (x, y), (1,))[1], expected(x, y)[1])
    assert not torch.equal(first, expected(x, y)[1]) and len(calls) == 3
    taped(twice_plus_tail, (x.to(torch.int32).float(), y), (1,))
    assert len(calls) == 3
    # Another dtype of the same size has a kernel of its own.
    taped(twice_plus_tail, (x.view(torch.int32), y), (1,))
    assert len(calls) == 6


def _doubled(x: Tensor, y: Tensor) -> Tensor:
    return (x + y) * 2


def torch_between(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2 * (x + y + y), which torch computes, and four times x + y + y."""
    between, out = torch.empty(8), torch.empty(8)
    launch(x, y, between, 8)
    doubled = compute(_doubled, between, y)
    launch(doubled, doubled, out, 8)
    return doubled, out


def test_torch_may_compute_a_step_of_its_own_between_launches() -> None:
    for seed in range(3):
        x, y = pair(seed)
        found = taped(torch_between, (x, y), ())
        assert torch.equal(found[0], 2 * (x + y + y)) and torch.equal(found[1], 4 * (x + y + y))
    assert len(calls) == 2  # those of the first call


def _computes_with_a_part(x: Tensor, y: Tensor) -> tuple[Tensor]:
    out = torch.empty(8)
    launch(x, y, out, 8)
    compute(_doubled, x[:4], y[4:])  # a tape has whole tensors alone
    return (out,)


def _computes(x: Tensor, y: Tensor) -> tuple[Tensor]:
    out, doubled = torch.empty(8), y * 2  # torch computes this one, not a launch
    launch(x, doubled, out, 8)
    return (out,)


def _returns_an_argument(x: Tensor, y: Tensor) -> tuple[Tensor]:
    launch(x, y, y, 8)
    return (y,)


def _returns_a_part(x: Tensor, y: Tensor) -> tuple[Tensor]:
    out = torch.empty(16)
    launch(x, y, out, 8)
    return (out[:8],)


def _launches_unseen(x: Tensor, y: Tensor) -> tuple[Tensor]:
    out = torch.empty(8)
    calls.append("launched")  # as kernel[grid](...) does, which nobody records
    add_kernel(x, y, out, 8)
    launch(x, y, torch.empty(8), 8)
    return (out,)


UNFIT = [_computes, _computes_with_a_part, _returns_an_argument, _returns_a_part, _launches_unseen]


@pytest.mark.parametrize("function", UNFIT)
def test_a_function_that_does_more_than_launch_is_called_every_time(
    function: Callable[..., tuple[Tensor]],
) -> None:
    for seed in range(3):
        x, y = pair(seed)
        wanted = x + (2 * y if function is _computes else y)
        assert torch.equal(taped(function, (x, y), ())[0], wanted)
    assert len(calls) == (6 if function is _launches_unseen else 3)


def test_the_same_tensor_given_twice_is_not_taken_for_one_argument() -> None:
    x, y = pair(0)
    taped(twice_plus_tail, (x, x), (1,))
    assert torch.equal(taped(twice_plus_tail, (x, y), (1,))[1], 2 * (x + y))


def test_whole_divisions_and_powers() -> None:
    assert [cdiv(number, 8) for number in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert [next_power_of_2(number) for number in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("router", ["smoe", "adaptive"])
def test_a_layer_gives_the_same_bits_with_and_without_tapes(
    router: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    torch.manual_seed(0)
    sizes = {"dim": 64, "hidden": 128, "num_experts": 8, "top_k": 2}
    moe = acmoe.MoE(**sizes, router=router, activation="swiglu").cuda().bfloat16().eval()
    x = torch.randn(3, tokens, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        states = [moe(one)[1] for one in x]
        taped_results = [moe(one, state) for one, state in zip(x, states, strict=True)]
        assert any(found is not None for found in tape._tapes.values())
        for one, state, (y, after) in zip(x, states, taped_results, strict=True):
            tape.forget()
            plain, plain_after = moe(one, state)
            assert torch.equal(plain, y)
            assert all(torch.equal(*both) for both in zip(plain_after, after, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("router", ["smoe", "adaptive"])
def test_a_training_step_gives_the_same_bits_with_and_without_tapes(
    router: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    torch.manual_seed(0)
    sizes = {"dim": 64, "hidden": 128, "num_experts": 8, "top_k": 2}
    moe = acmoe.MoE(**sizes, router=router, activation="swiglu").cuda().bfloat16()
    x = torch.randn(3, tokens, 64, device="cuda", dtype=torch.bfloat16)

    def step(one: Tensor) -> list[Tensor]:
        moe.zero_grad()
        one = one.clone().requires_grad_()
        y, state = moe(one)
        (y.float().square().sum() + state.aux_loss).backward()
        return [y, *state, one.grad, *(p.grad.clone() for p in moe.parameters())]

    taped_results = [step(one) for one in x]
    with torch.no_grad():  # the same shapes and settings, but h is not kept
        moe(x[0])
    taped_results[0] = step(x[0])
    assert any(found is not None for found in tape._tapes.values())
    for one, results in zip(x, taped_results, strict=True):
        tape.forget()
        assert all(torch.equal(*both) for both in zip(step(one), results, strict=True))
