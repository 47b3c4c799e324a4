"""Training steps of a layer by tapes: the same kernels at other addresses give the same bits.

Without a GPU the kernels run in Triton's interpreter. `launch_by_address` stands for the launcher:
it records interpreted kernels as if they were compiled ones, which take addresses.
"""

import contextlib
import ctypes
import inspect
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from route_cases import sorted_by
from torch import Tensor

import acmoe
from acmoe.ops.device import launcher, tape
from acmoe.ops.device.launcher import Compiled, recorder
from acmoe.ops.dispatch import use_backend
from acmoe.ops.experts.settings import rules
from acmoe.ops.experts.settings.gemms import GROUPED_MM
from acmoe.routing.statistics import build_statistics
from slow_cases import mostly_slow

launched: list[object] = []  # an entry for each launch that was not repeated from a tape
SIZES = {"dim": 16, "hidden": 24, "num_experts": 3, "top_k": 2}


def at_address(address: int, dtype: torch.dtype, count: int) -> Tensor:
    """Return the `count` numbers at an address as a tensor."""
    if count == 0 or address == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class ByAddress:
    """An interpreted kernel that is called as a compiled one, with addresses for tensors."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kernel, self.options, self.num_args = kernel, options, len(args)
        self.sizes = [
            (one.dtype, one.untyped_storage().nbytes() // one.element_size() - one.storage_offset())
            if isinstance(one, Tensor)
            else None
            for one in args
        ]

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        values = rest[6:][: self.num_args]  # after stream, function, metadata and three hooks
        args = [
            one if size is None else at_address(one, *size)
            for one, size in zip(values, self.sizes, strict=True)
        ]
        self.kernel[(x, y, z)](*args, **self.options)


def launch_by_address(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    launched.append(kernel)
    # Else a compiled kernel could not be called with its arguments in order.
    assert set(list(inspect.signature(kernel.fn).parameters)[len(args) :]) <= set(options)
    recorder.computing = True  # the interpreter calls torch
    kernel[grid](*args, **options)
    recorder.computing = False
    if recorder.steps is not None:
        run = ByAddress(kernel, args, options)
        recorder.add(Compiled(run, None, None, (), (None, None)), grid, args)


@contextlib.contextmanager
def counted() -> Iterator[list[object]]:
    seen: list[object] = []
    before = len(launched)
    yield seen
    seen += launched[before:]


@contextlib.contextmanager
def tapes() -> Iterator[None]:
    """Record and repeat launches; kernels that were not imported yet are left alone."""
    tape.forget()
    if torch.cuda.is_available():
        yield
        return
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape, "driver", SimpleNamespace(active=driver))
        patch.setattr(tape, "plain_launches", lambda: True)
        patch.setattr(tape, "count_launches", counted)
        for module in list(sys.modules.values()):
            if getattr(module, "launch", None) is launcher.launch and module is not launcher:
                patch.setattr(module, "launch", launch_by_address)
        yield
    tape.forget()


def repeated_backwards() -> set[str]:
    """Return the names of the functions of a backward that have a tape."""
    names = {
        key[0].__name__ if key[0].__name__ != "_gradients" else "experts"
        for key, found in tape._tapes.items()
        if found is not None
    }
    return names & {"experts", "_with_share"}


class Trial:
    """A layer and batches of tokens for it."""

    def __init__(self, device: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.moe = acmoe.MoE(**(SIZES | options)).to(device)
        generator = torch.Generator().manual_seed(1)
        self.batches = torch.randn(2, 5, SIZES["dim"], generator=generator).to(device)
        self.device = device

    def step(self, at: int) -> list[Tensor]:
        """Return the outputs and all gradients of one batch."""
        torch.manual_seed(at)  # of dropout
        for one in self.moe.parameters():
            one.grad = None
        x = self.batches[at].clone().requires_grad_()
        with use_backend("triton"):
            y, state = self.moe(x)
            (y.square().sum() + 3 * state.aux_loss).backward()
        grads = [one.grad for one in self.moe.parameters() if one.requires_grad]
        assert all(one is not None for one in grads)
        return [y.detach(), state.aux_loss.detach(), x.grad, *grads]


CASES = {
    "plain": {"activation": "swiglu", "bias": False},
    "bias": {"router": "adaptive", "activation": "relu"},
    "dropout": {"activation": "swiglu", "bias": False, "dropout": 0.4},
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "dropout")]


@pytest.mark.parametrize("case", ["bias", *SLOW])
def test_a_training_step_has_the_same_bits_by_a_tape(case: str, device: str) -> None:
    trial = Trial(device, **CASES[case])
    wanted = trial.step(1)  # without tapes; it imports all kernels
    with tapes():
        trial.step(0)
        assert repeated_backwards() == {"experts", "_with_share"}
        count = len(launched)
        found = trial.step(1)
        repeats = len(launched) - count
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
    if device == "cpu":
        assert repeats == 0


GIVEN = ["as they come", "with padding", "sorted"]
MODES = [("batch", True), ("running", True), ("batch", False)]


# Quick: each kind of tokens and each mode once or twice.
@mostly_slow(
    ("given", "mode", "training"),
    [(given, *mode) for given in GIVEN for mode in MODES],
    keep={0, 4, 8},
    gpu={7},
)
def test_a_batch_is_measured_and_added_by_one_tape(
    mode: str, training: bool, given: str, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 11, 16, generator=generator).to(device)
    cluster = torch.randint(0, 3, (3, 2, 11), generator=generator).to(device)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, 7:] = False
    mask_BL = mask.to(device) if given == "with padding" else None
    orders = [sorted_by(one.flatten(), 3) if given == "sorted" else None for one in cluster]

    def results() -> list[Tensor]:
        """Return the scales of three batches, and what waits after them."""
        config = acmoe.AdaptiveConfig(statistics=mode)
        taken = build_statistics(config, num_clusters=3, dim=16).to(device).train(training)
        scales = []
        for at in range(3):
            with use_backend("triton"):
                scales.append(taken.cluster_scale(x[at], cluster[at], mask_BL, None, orders[at]))
            counts.append(len(launched))
        return [*scales, taken.last_dispersion, taken.last_count]

    counts: list[int] = []
    wanted = results()  # without tapes; it imports all kernels
    with tapes():
        found = results()
        assert [key[0].__name__ for key in tape._tapes] == [
            "_run_sorted" if given == "sorted" else "_run_unsorted"
        ]
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
    real = cluster[:, mask] if given == "with padding" else cluster
    number = real.flatten().bincount(minlength=3).float()
    assert torch.equal(found[-1], number if training else torch.zeros_like(number))
    if device == "cpu":
        assert counts[3] > counts[2] and counts[3] == counts[4] == counts[5]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "tokens"), [("plain", 300), ("bias", 1), ("dropout", 300)])
def test_sixteen_bits_have_the_same_bits_by_a_tape(case: str, tokens: int) -> None:
    """At these sizes the Hopper kernels run, if the GPU has them."""
    torch.manual_seed(0)
    sizes = {"dim": 128, "hidden": 512, "num_experts": 4, "top_k": 2}
    moe = acmoe.MoE(**sizes, **CASES[case]).cuda().bfloat16()
    assert_steps_by_tape(moe, tokens)


def noted(called: list[str], name: str, run: Any, *args: Any, **options: Any) -> Tensor:
    called.append(name)
    return run(*args, **options)


@pytest.mark.gpu
def test_the_grouped_gemm_of_torch_is_a_step_of_a_tape(
    monkeypatch: pytest.MonkeyPatch, fresh_choice: Any
) -> None:
    def torch_where_it_can(kernel: str, layer: rules.Layer, *, copied: bool) -> Any:
        return None if kernel == "hidden" else GROUPED_MM

    called: list[str] = []
    monkeypatch.setattr(rules, "pipeline", torch_where_it_can)
    for name in ("rows_by_torch", "weights_by_torch"):
        run = getattr(fresh_choice, name)
        monkeypatch.setattr(fresh_choice, name, partial(noted, called, name, run))
    torch.manual_seed(0)
    sizes = {"dim": 128, "hidden": 512, "num_experts": 4, "top_k": 2}
    moe = acmoe.MoE(**sizes, activation="swiglu", bias=False).cuda().bfloat16()
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("it is used for weight gradients on Hopper alone")
    assert_steps_by_tape(moe, 300)
    # In each of five steps: down, and in the backward two weight gradients and the input's.
    assert sorted(set(called)) == ["rows_by_torch", "weights_by_torch"] and len(called) == 20


def assert_steps_by_tape(moe: acmoe.MoE, tokens: int) -> None:
    """Compare two repeated steps with steps of the same tokens that record."""
    x = torch.randn(3, tokens, 128, device="cuda", dtype=torch.bfloat16)

    def step(at: int) -> list[Tensor]:
        torch.manual_seed(at)
        given = x[at].clone().requires_grad_()
        y, state = moe(given)
        loss = y.float().square().sum() + state.aux_loss
        return [y, *torch.autograd.grad(loss, [given, *moe.parameters()])]

    tape.forget()
    step(0)
    assert repeated_backwards() == {"experts", "_with_share"}
    found = [step(at) for at in (1, 2)]
    for at, results in enumerate(found, 1):
        tape.forget()
        assert all(torch.equal(*both) for both in zip(step(at), results, strict=True))


@pytest.mark.gpu
def test_a_repeated_step_needs_no_more_memory_than_one_without_tapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    sizes = {"dim": 1024, "hidden": 1024, "num_experts": 8, "top_k": 2}
    moe = acmoe.MoE(**sizes, activation="swiglu", bias=False).cuda().bfloat16()
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        y, state = moe(x)
        torch.autograd.grad(y.sum() + state.aux_loss, [x, *moe.parameters()])
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    tape.forget()
    recorded, repeated, again = (peak() for _ in range(3))
    monkeypatch.setattr(tape, "plain_launches", lambda: False)
    plain = [peak() for _ in range(2)][-1]
    small = 4 * 2**20  # what is one buffer, and rounding
    assert max(recorded, repeated, again) <= plain + small
