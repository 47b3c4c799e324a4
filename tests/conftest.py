"""Fixtures of all tests: one thread, repeatable cases, seeds, tiny runs, memory, a browser."""

import functools
import gc
import logging
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from acmoe.data.text import prepare, stdlib
from acmoe.ops.native import library
from chromium import chromium
from cpu import settle_cpu

settle_cpu()

settings.register_profile(
    "acmoe",
    deadline=None,  # a shared machine may stall any example
    derandomize=True,  # the same cases on every machine and in every run
    max_examples=25,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", parent=settings.get_profile("acmoe"), max_examples=10)
settings.load_profile("acmoe")  # `make test` asks for the quick one: --hypothesis-profile=quick


# torch describes each step of a compilation to the readers of this log, and pytest 9 reads each log
# that does not pass its lines on. Nobody looks at them here, and to make them takes time.
TRACE = logging.getLogger("torch.__trace")
TRACE.handlers.clear()
TRACE.propagate = True


def pytest_configure() -> None:
    """Receive ctrl-C, which a shell script ignores in commands that it starts in the background.

    Tests send it to themselves and to commands that they start, and would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from the objects that imports make, now and in the tests.

    They are a million and stay until the end. The collector would look at them while the tests are
    collected, for a fifth of that time, and in every gc.collect() of a test, for half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # a test makes thousands of objects that stay for it
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Triton's bindings report what is still there when Python ends


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call no C kernel serves, until the test ends."""
    return lambda: monkeypatch.setattr(library, "missing", lambda: "a test does without")


@pytest.fixture
def no_native(without_native: Callable[[], None]) -> None:
    """Let no C kernel serve: the test is about the bits of other kernels."""
    without_native()


@pytest.fixture(scope="module")
def no_native_here() -> Iterator[None]:
    """Let no C kernel serve in any test of the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "missing", lambda: "these tests do without")
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _library_read_once() -> Iterator[None]:
    """Read the source of the running Python once: 600 files, which take a second."""

    @functools.cache
    def read_running() -> list[stdlib.SourceFile]:
        return stdlib.read_stdlib(None, lambda *_: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            prepare,
            "read_stdlib",
            lambda root, progress: (
                read_running() if root is None else stdlib.read_stdlib(root, progress)
            ),
        )
        yield


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny language model's run."""
    from tiny_runs import byte_corpus, tiny_run, trained  # most tests need no training loop

    folder = tmp_path_factory.mktemp("text")
    return trained(tiny_run(byte_corpus(folder), "steps=8", "eval_every=4"), folder / "run")


@pytest.fixture(scope="module")
def image_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny image classifier's run."""
    from tiny_vision_runs import tiny_vision_run, trained_images

    folder = tmp_path_factory.mktemp("images")
    return trained_images(tiny_vision_run("steps=4"), folder / "run")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; modules that use it are skipped where `chromium.why_not()` says so."""
    with chromium() as found:
        yield found


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """`torch.empty` is filled with NaN: reading memory nobody wrote shows in the result."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        torch.utils.deterministic.fill_uninitialized_memory = was_filled
