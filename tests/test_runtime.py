"""The device of a run, its precision, and the state of its random generators."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from acmoe import runtime
from acmoe.config.updates import check_device
from acmoe.data.transfer import to_device
from acmoe.errors import UserError
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import use_backend
from acmoe.ops.experts.op import grouped_gemm_unsupported
from acmoe.runtime import autocast, keeping_rng, pick_device, rng_states, set_rng_states
from acmoe.train.rng import restore_rng, rng_tensors
from acmoe.train.run import train
from tiny_runs import QUIET, byte_corpus, tiny_run

CPU = torch.device("cpu")


@pytest.fixture
def fresh_process() -> Iterator[None]:
    """oneDNN is on and no bf16 product has run, as at the start of a process."""
    was_on = torch.backends.mkldnn.enabled
    runtime._settle_bf16_gemm.cache_clear()
    torch.backends.mkldnn.set_flags(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # without the filters that the other tests run under
        yield
    torch.backends.mkldnn.set_flags(was_on)


def test_a_bf16_training_run_on_a_cpu_gives_no_warning(
    fresh_process: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # 64 wide: its products are large enough for oneDNN, which warns where a CPU has no bf16.
    sizes = ("model.dim=64", "model.hidden=64", "steps=2", "eval_every=2")
    config = tiny_run(byte_corpus(tmp_path), "precision=bf16", *sizes)
    train(config, tmp_path / "run", console=QUIET)
    assert capfd.readouterr().err == ""


def test_only_the_warning_of_the_first_bf16_product_is_held_back(fresh_process: None) -> None:
    with autocast("bf16", CPU):
        assert torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64)).eq(64).all()
        with pytest.warns(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)
    assert warnings.filters[0][0] == "error"  # nothing of ours is left behind


def test_fp32_leaves_products_alone(fresh_process: None) -> None:
    with autocast("fp32", CPU):
        assert torch.ones(64, 64).mm(torch.ones(64, 64)).dtype == torch.float32
    assert torch.backends.mkldnn.enabled and runtime._settle_bf16_gemm.cache_info().misses == 0


def offer(patch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Let torch find two GPUs of each of these kinds (one, where the kind is mps)."""
    for kind, module in (("cuda", torch.cuda), ("xpu", torch.xpu)):
        there = kind in kinds
        patch.setattr(module, "is_available", lambda there=there: there)
        patch.setattr(module, "device_count", lambda there=there: 2 if there else 0)
    patch.setattr(torch.backends.mps, "is_available", lambda: "mps" in kinds)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("mps", "xpu", "cuda"), "cuda"),
        (("mps", "xpu"), "xpu"),
        (("mps",), "mps"),
        ((), "cpu"),
    ],
)
def test_auto_takes_the_first_gpu_there_is_and_says_so(
    kinds: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    offer(monkeypatch, *kinds)
    runtime._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="acmoe"):
        assert pick_device("auto") == torch.device(expected)
        pick_device("auto")
    assert [record.message for record in caplog.records] == [f"device=auto is {expected}"]


def test_a_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "xpu")
    assert pick_device("xpu:1") == torch.device("xpu", 1)
    for name, found in (("xpu:2", "2 XPU"), ("mps", "0 MPS"), ("cuda", "0 CUDA")):
        with pytest.raises(UserError, match=f"device={name}, but torch finds {found} devices"):
            pick_device(name)
    for name in ("mps:1", "rocm", "gpu"):
        with pytest.raises(UserError, match="use auto, cpu, cuda, cuda:0, xpu or mps"):
            check_device(name)


def test_bf16_on_mps_needs_a_macos_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    with pytest.raises(UserError, match="needs macOS 14"):
        autocast("bf16", torch.device("mps"))


class Generator:
    """The random generator of a device that is not there."""

    def __init__(self) -> None:
        self.state = torch.tensor([1], dtype=torch.uint8)

    def get_rng_state(self, *device: torch.device) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor, *device: torch.device) -> None:
        self.state = state


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_random_states_of_every_device_are_saved_and_restored(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, generator = torch.device(kind), Generator()
    monkeypatch.setattr(torch, kind, generator)
    monkeypatch.setattr(torch, "get_device_module", lambda device: generator)
    saved, first = rng_tensors(device), generator.state
    assert sorted(saved) == ["rng/cpu", f"rng/{kind}"]
    with keeping_rng(device):
        generator.state = torch.tensor([2], dtype=torch.uint8)
    assert generator.state is first
    generator.state = torch.tensor([3], dtype=torch.uint8)
    number = torch.rand(1)
    restore_rng({**saved, "optimizer/x": first}, device)
    assert generator.state is first and torch.rand(1) == number
    set_rng_states(rng_states(torch.device("cpu")), device)  # a run that was saved on a CPU
    assert generator.state is first


def test_kernels_leave_amd_intel_and_apple_gpus_to_plain_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("acmoe.ops.device_support._installed", {"triton": True})
    monkeypatch.setattr("acmoe.ops.device_support.interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    for kind in ("xpu", "mps", "cuda"):
        x = SimpleNamespace(
            device=torch.device(kind), is_cpu=False, dtype=torch.bfloat16, element_size=lambda: 2
        )
        assert (triton_unsupported(x) is None) == (kind == "cuda")  # type: ignore[arg-type]
        assert (grouped_gemm_unsupported(x, 8) is None) == (kind == "cuda")  # type: ignore[arg-type]
    monkeypatch.setattr(torch.version, "hip", "6.4")  # ROCm: an AMD GPU by the name of cuda
    assert "AMD" in (triton_unsupported(x) or "")  # type: ignore[arg-type]
    assert "AMD" in (grouped_gemm_unsupported(x, 8) or "")  # type: ignore[arg-type]
    with use_backend("triton"):
        assert triton_unsupported(x) is None  # type: ignore[arg-type]


def test_only_cuda_pins_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []

    class Pinned(torch.Tensor):
        def pin_memory(self, *_: object) -> "Pinned":
            moved.append("pinned")
            return self

        def to(self, device: torch.device, **_: object) -> "Pinned":  # type: ignore[override]
            moved.append(device.type)
            return self

    for kind in ("cpu", "mps", "xpu", "cuda"):
        to_device(torch.zeros(1).as_subclass(Pinned), torch.device(kind))
    assert moved == ["cpu", "mps", "xpu", "pinned", "cuda"]
