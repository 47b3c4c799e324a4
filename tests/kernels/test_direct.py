"""A tape calls what Triton's launcher would call, with the same arguments, or the launcher."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acmoe.ops.device.direct import passed_on
from acmoe.ops.device.playback import write_play
from acmoe.ops.device.recording import Step, Steps

CALL = (3, 2, 1, 7, "function", "metadata", None, None, None, 1000, 8, 0.5)


class Launcher:
    """A launcher as Triton's: it passes its arguments on, and scratch memory if there is any."""

    def __init__(self, launch: Any, scratch: int = 0) -> None:
        self.launch, self.scratch, self.cooperative = launch, scratch, False

    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *rest: Any) -> None:
        memory = x * y * z * self.scratch if self.scratch > 0 else None
        self.launch(x, y, z, stream, function, self.cooperative, memory, *rest)


class Packing(Launcher):
    """A launcher that passes the arguments of the kernel on as one tuple."""

    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *rest: Any) -> None:
        metadata, hook, enter, leave, *values = rest
        self.launch(x, y, z, stream, function, metadata, hook, enter, leave, tuple(values))


class Adding(Launcher):
    """A launcher that adds an argument of each call."""

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments, object())


class Twice(Launcher):
    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)
        self.launch(*arguments)


class Dropping(Launcher):
    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments[:-1])


class Turning(Launcher):
    def __call__(self, x: Any, y: Any, z: Any, *rest: Any) -> None:
        self.launch(y, x, z, *rest)


def play(run: Any) -> None:
    """Repeat a step with the arguments of CALL; the first of the kernel is the address 1000."""
    values = [None, 8, 0.5]
    head = (3, 2, 1, "function", "metadata")
    step = Step((), run, head, values, ((0, 0, 0),), (), ())
    steps = Steps((step,), num_slots=1, num_bytes=0, order=())
    write_play(steps, 1, lambda *layout: torch.empty(0))((None,), [1000], 7)


@pytest.mark.parametrize(
    ("kind", "scratch", "known"),
    [
        (Launcher, 0, True),
        (Packing, 0, True),
        (Launcher, 64, False),
        (Adding, 0, False),
        (Twice, 0, False),
        (Dropping, 0, False),
        (Turning, 0, False),
    ],
)
def test_a_tape_passes_on_what_the_launcher_does(
    kind: type[Launcher], scratch: int, known: bool
) -> None:
    noted: list[tuple[Any, ...]] = []
    run = kind(lambda *arguments: noted.append(arguments), scratch)
    run(*CALL)
    wanted = list(noted)
    noted.clear()
    assert (passed_on(run, 3) is not None) == known
    assert not noted  # the trial launches nothing
    play(run)
    if kind is Adding:  # a new object in each call
        noted, wanted = [one[:-1] for one in noted], [one[:-1] for one in wanted]
    assert noted == wanted


def test_a_known_launcher_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[Any, ...]] = []
    run = Launcher(lambda *arguments: noted.append(arguments))
    called: list[int] = []
    call = Launcher.__call__

    def counted(self: Launcher, *arguments: Any) -> None:
        called.append(1)
        call(self, *arguments)

    monkeypatch.setattr(Launcher, "__call__", counted)
    play(run)
    assert len(called) == 1 and len(noted) == 1  # the trial


def test_a_function_is_called_as_it_is() -> None:
    assert passed_on(lambda *arguments: None, 3) is None


def test_the_launcher_of_the_installed_triton_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("triton.runtime.driver")
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    if not torch.cuda.is_available():  # it asks for the driver, though it does not need it
        monkeypatch.setattr(driver.driver, "_active", SimpleNamespace())
    noted: list[tuple[Any, ...]] = []
    run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    sizes = {"global_scratch_size": 0, "global_scratch_align": 1, "num_ctas": 1}
    profile = {"profile_scratch_size": 0, "profile_scratch_align": 1, "gsan_enabled": False}
    options = {"launch_cooperative_grid": False, "launch_pdl": False}
    signature = {"arg_annotations": ("a",), "kernel_signature": b"s"}
    vars(run).update(sizes | profile | options | signature)
    run.launch = lambda *arguments: noted.append(arguments)
    run(*CALL)  # an AttributeError names what a new Triton needs above
    (wanted,) = noted
    noted.clear()
    assert passed_on(run, 3) is not None
    play(run)
    assert noted == [wanted]
    run.global_scratch_size = 8
    assert passed_on(run, 3) is None
