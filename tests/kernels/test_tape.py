"""A tape repeats the launches of a call with other tensors, or leaves the call alone.

The kernels here are Python functions that read and write float32 at addresses, as a GPU would.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import acmoe
from acmoe.ops.device import recording, tape
from acmoe.ops.device.launcher import Compiled, cdiv, compute, next_power_of_2, recorder
from acmoe.ops.device.tape import taped

calls: list[object] = []  # an entry for each launch that was not repeated from a tape


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    driver = SimpleNamespace(
        active=SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    )
    monkeypatch.setattr(tape, "driver", driver)
    monkeypatch.setattr(tape, "plain_launches", lambda: True)
    monkeypatch.setattr(tape, "count_launches", counted)
    calls.clear()
    tape.forget()
    yield
    tape.forget()


@contextlib.contextmanager
def counted() -> Iterator[list[object]]:
    seen: list[object] = []
    before = len(calls)
    yield seen
    seen += calls[before:]


def numbers(address: Tensor | int, count: int) -> Any:
    pointer = address.data_ptr() if isinstance(address, Tensor) else address
    return (ctypes.c_float * count).from_address(pointer)


def add_kernel(*given: Any) -> None:
    """out[i] = left[i] + right[i] for `count` numbers."""
    *_, left, right, out, count = given
    left_, right_, out_ = (numbers(one, count) for one in (left, right, out))
    for i in range(count):
        out_[i] = left_[i] + right_[i]


def launch(*args: Any) -> None:
    """Launch `add_kernel` as acmoe.ops.device.launcher.launch does, and record it."""
    calls.append("launched")
    add_kernel(*args)
    if recorder.steps is not None:
        recorder.add(Compiled(add_kernel, None, None, (), (None, None)), (1,), args)


def twice_plus_tail(x: Tensor, y: Tensor, scale: int = 1) -> tuple[Tensor, Tensor]:
    """Return (x + y) + (x + y), by way of a buffer, and the sum of the halves of y."""
    between = torch.empty(2, 8)
    both, tail = torch.empty(8), x.new_empty(4)
    launch(x, y, between[1], 8)
    launch(between[1], between[1], both, 8)
    launch(y, y[4:], tail, 4)
    return tail, both


def expected(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y[:4] + y[4:], 2 * (x + y)


def pair(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, generator=generator), torch.randn(8, generator=generator)


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
        monkeypatch.setattr(repeated.tuning, "user_table", lambda: table)
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


@pytest.mark.parametrize("found", [None, tape._compiled_allocator("cpu")])
def test_memory_has_the_shape_that_is_asked_for(
    found: tape.Allocator | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape, "_compiled_allocator", lambda kind: found)
    made = tape.allocator(torch.device("cpu"))((2, 3), (3, 1), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.bfloat16)
    assert tape.allocator(torch.device("meta"))((2, 3), (3, 1), torch.int64).is_meta


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


def through_large_memory(x: Tensor, y: Tensor) -> tuple[Tensor]:
    """Return 8 * (x + y) by way of three buffers, of which two are needed at a time."""
    for _ in range(3):
        between = torch.empty(8)
        used.append(StorageWeakRef(between.untyped_storage()))
        launch(x, y, between, 8)
        x = y = between
    out = torch.empty(8)
    launch(x, y, out, 8)
    return (out,)


used: list[StorageWeakRef] = []  # by `through_large_memory`


def test_large_memory_is_held_from_its_first_launch_to_its_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []  # tensors of the tape that exist, each time that it allocates one
    made: list[weakref.ref[Tensor]] = []

    def empty(*layout: Any) -> Tensor:
        found = torch.empty_strided(layout[0], layout[1], dtype=layout[2])
        made.append(weakref.ref(found))
        held.append(sum(one() is not None for one in made))
        return found

    monkeypatch.setattr(recording, "LARGE_BYTES", 32)  # as large as each buffer
    monkeypatch.setattr(tape, "allocator", lambda device: empty)
    x, y = pair(0)
    taped(through_large_memory, (x, y), ())
    assert not made
    assert torch.equal(taped(through_large_memory, (x, y), ())[0], 8 * (x + y))
    assert held == [1, 2, 2, 2] and len(calls) == 4


def test_small_memory_is_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def empty(*layout: Any) -> Tensor:
        made.append(layout)
        return torch.empty_strided(layout[0], layout[1], dtype=layout[2])

    monkeypatch.setattr(tape, "allocator", lambda device: empty)
    x, y = pair(0)
    for _ in range(2):
        assert torch.equal(taped(through_large_memory, (x, y), ())[0], 8 * (x + y))
    # Three buffers of 32 bytes, each at a multiple of 256.
    assert made == [((768,), (1,), torch.uint8), ((8,), (1,), torch.float32)]


def test_a_recorded_call_frees_its_memory_as_any_other() -> None:
    used.clear()

    def watched(x: Tensor, y: Tensor) -> tuple[Tensor]:
        found = through_large_memory(x, y)
        assert all(one.expired() for one in used)
        return found

    taped(watched, pair(0), ())
    assert len(used) == 3 and next(iter(tape._tapes.values())) is not None


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


def test_the_balance_loss_of_a_call_without_gradient_is_that_of_its_definition(device: str) -> None:
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.route import ScaledTokens, route

    generator = torch.Generator().manual_seed(0)
    for tokens in (5, 150):  # one program computes it, or a launch after several
        x = torch.randn(tokens, 16, generator=generator)
        embedding = torch.randn(6, 16, generator=generator)
        share = (x.double() @ embedding.double().T / 0.7).softmax(-1).mean(0)
        chosen = (x.double() @ embedding.double().T).topk(2).indices
        load = torch.bincount(chosen.flatten(), minlength=6).double() / (2 * tokens)
        with torch.no_grad(), use_backend("triton"):
            given = ScaledTokens(x.to(device)), embedding.to(device), None
            options = {"top_k": 2, "over_selected": True, "temperature": 0.7}
            found = route(*given, **options, balance_only=True)
            summed = route(*given, **options)
        assert found.gate_sum is None and found.load is None and summed.balance is None
        wanted = 6 * (share * load).sum()
        torch.testing.assert_close(found.balance.double().cpu(), wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(summed.load.double().cpu(), load * 2 * tokens)


@pytest.mark.parametrize("tokens_learn", [True, False])  # False: x is the input of the model
def test_the_balance_loss_of_a_recorded_call_has_the_gradient_of_its_definition(
    tokens_learn: bool, device: str
) -> None:
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.route import ScaledTokens, route

    generator = torch.Generator().manual_seed(0)
    for tokens in (5, 150):
        x = torch.randn(tokens, 16, generator=generator)
        embedding = torch.randn(6, 16, generator=generator)
        x64, embedding64 = (one.double().requires_grad_() for one in (x, embedding))
        affinity = x64 @ embedding64.T
        load = torch.bincount(affinity.topk(2).indices.flatten(), minlength=6) / (2 * tokens)
        wanted = 6 * ((affinity / 0.7).softmax(-1).mean(0) * load).sum()
        (3 * wanted + (x64 * 2).sum()).backward()
        x_on, embedding_on = (one.detach().clone().to(device) for one in (x, embedding))
        x_on.requires_grad_(tokens_learn)
        embedding_on.requires_grad_()
        options = {"top_k": 2, "over_selected": True, "temperature": 0.7, "balance_only": True}
        with use_backend("triton"):
            found = route(ScaledTokens(x_on), embedding_on, None, **options)
        assert found.gate_sum is None and found.load is None and found.balance is not None
        assert found.x.requires_grad == tokens_learn
        (3 * found.balance + (found.x * 2).sum()).backward()
        torch.testing.assert_close(found.balance.double().cpu(), wanted, rtol=1e-5, atol=0)
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(embedding_on.grad.double().cpu(), embedding64.grad, **close)
        if tokens_learn:
            torch.testing.assert_close(x_on.grad.double().cpu(), x64.grad, **close)
        else:
            assert x_on.grad is None


def test_a_call_without_balance_loss_has_the_gradient_of_its_gates(device: str) -> None:
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.route import ScaledTokens, route

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 16, generator=generator)
    embedding = torch.randn(6, 16, generator=generator)
    embedding64 = embedding.double().requires_grad_()
    chosen = (x.double() @ embedding64.T).topk(2).values.softmax(-1)
    chosen[:, 0].sum().backward()
    embedding = embedding.to(device).requires_grad_()
    with use_backend("triton"):
        found = route(ScaledTokens(x.to(device)), embedding, None, top_k=2, over_selected=True)
    assert found.gate_sum is None and found.load is None and found.balance is None
    found.gate[:, 0].sum().backward()
    torch.testing.assert_close(
        embedding.grad.double().cpu(), embedding64.grad, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("measure", ["mad", "std"])
def test_a_dispersion_without_gradient_is_written_where_it_is_wanted(
    measure: str, device: str
) -> None:
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.statistics.op import measure_dispersion

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 16, generator=generator)
    cluster = torch.tensor([0, 1, 1, 0, 2, 1, -1, 0, 1])
    into = torch.zeros(4, 16, device=device), torch.zeros(4, device=device)
    with use_backend("triton"):
        found = measure_dispersion(
            x.to(device), cluster.to(device), 4, measure=measure, token_mask=None, out=into
        )
    assert found[0] is into[0] and found[1] is into[1]
    assert all(one._version > 0 for one in into)  # autograd would notice
    assert into[1].tolist() == [3, 4, 1, 0]
    for c in range(4):
        own = x.double()[cluster == c]
        off = own - own.mean(0) if len(own) else own
        wanted = off.abs().mean(0) if measure == "mad" else off.square().mean(0).sqrt()
        if len(own) >= 2:
            torch.testing.assert_close(into[0][c].double().cpu(), wanted, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize(("rows", "most"), [(1, 512), (512, 512), (514, 512)])
def test_few_rows_and_many_are_sorted_alike(
    rows: int, most: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to `most` are sorted by one launch."""
    from acmoe.ops.sort.triton import sort
    from acmoe.ops.sort.triton.sort import sort_rows

    monkeypatch.setattr(sort, "FEW_ROWS", most)
    ids = torch.randint(0, 6, (rows, 1), generator=torch.Generator().manual_seed(rows))
    permutation, inverse, offsets, expert = (one.cpu() for one in sort_rows(ids.to(device), 5))
    wanted, order = ids.flatten().sort(stable=True)  # the id 5 means "no expert" and comes last
    assert torch.equal(expert, wanted) and torch.equal(permutation, order)
    assert torch.equal(inverse[order], torch.arange(rows))
    assert offsets.tolist() == [int((ids <= e).sum()) for e in range(5)]


def test_a_second_derivative_through_the_router_op_raises(device: str) -> None:
    """A gradient by a tape would have no derivative, without a word."""
    from acmoe.ops.route.autograd import route_op

    generator = torch.Generator().manual_seed(0)
    x, embedding = (torch.randn(n, 16, generator=generator).to(device) for n in (5, 6))
    x.requires_grad_()
    gate = route_op(x, embedding, None, None, None, 2, True, None, 1.0, None, None, None)[1]
    (first,) = torch.autograd.grad(gate[:, 0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.square().sum().backward()
