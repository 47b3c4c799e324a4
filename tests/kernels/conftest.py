"""Without a GPU the kernels run in Triton's interpreter, in this process.

Triton chooses between compiler and interpreter when a kernel is defined, by an environment
variable; its own functions (tl.sum and such) are defined when it is imported. The variable is set
for those moments only: elsewhere a CPU keeps the plain PyTorch form.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from quick_interpreter import quicken, without_overflow_checks

VARIABLE = "TRITON_INTERPRET"


def import_triton_to_interpret() -> None:
    # Modules imported before (torch._dynamo does) were defined for the compiler: import again. The
    # compiled part of Triton is the same for both, and cannot be loaded twice.
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    os.environ[VARIABLE] = "1"
    try:
        import triton.experimental.gluon.language
        import triton.language
        import triton.runtime.interpreter
    finally:
        del os.environ[VARIABLE]
    quicken(triton.runtime.interpreter)


if (
    not torch.cuda.is_available()
    and VARIABLE not in os.environ
    and importlib.util.find_spec("triton") is not None
):
    import_triton_to_interpret()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels imported by a test are interpreted; numpy, which that uses, does not warn of NaN.

    Slow tests check integers for overflow, too.
    """
    if not torch.cuda.is_available():
        monkeypatch.setenv(VARIABLE, "1")
    module = sys.modules.get("triton.runtime.interpreter")
    quick = module is not None and request.node.get_closest_marker("slow") is None
    checks = without_overflow_checks(module) if quick else contextlib.nullcontext()
    with np.errstate(all="ignore"), checks:
        yield


@pytest.fixture
def fresh_choice():
    """hopper/choice.py, with the cache of its choices cleared before and after."""
    pytest.importorskip("triton")
    from acmoe.ops.experts.hopper import choice

    choice._usable_settings.cache_clear()
    yield choice
    choice._usable_settings.cache_clear()


@pytest.fixture
def hopper_launch(monkeypatch):
    """The launches of the Hopper GEMMs; without a GPU their kernels are emulated."""
    pytest.importorskip("triton.experimental.gluon")
    from acmoe.ops.experts.hopper import columns as columns_module
    from acmoe.ops.experts.hopper import hidden as hidden_module
    from acmoe.ops.experts.hopper import launch as hopper_launch
    from acmoe.ops.experts.hopper import rows as rows_module
    from acmoe.ops.experts.hopper import tokens as tokens_module
    from acmoe.ops.experts.hopper import up as up_module
    from acmoe.ops.experts.hopper import weights as weights_module

    if not torch.cuda.is_available():
        from gluon_emulator import emulate

        for module, name in (
            (rows_module, "rows_gemm_kernel"),
            (hidden_module, "hidden_gradient_kernel"),
            (weights_module, "weight_gradient_kernel"),
            (tokens_module, "gathered_weight_gradient_kernel"),
            (up_module, "up_swiglu_kernel"),
            (columns_module, "columns_kernel"),
        ):
            monkeypatch.setattr(module, name, emulate(getattr(module, name), seed=1))
    return hopper_launch


@pytest.fixture(autouse=True)
def _no_tapes() -> None:
    """Let every call launch its kernels itself: a tape of an earlier test would repeat them."""
    if importlib.util.find_spec("triton") is not None:
        from acmoe.ops.device import tape

        tape.forget()


@pytest.fixture
def simulated_launches(monkeypatch) -> Iterator[None]:
    """Tapes of the launches in tape_cases.py, which need no GPU."""
    from tape_cases import simulate

    from acmoe.ops.device import tape

    simulate(monkeypatch)
    yield
    tape.forget()


@pytest.fixture
def products_by_torch(monkeypatch) -> None:
    """Replace the experts: the interpreter spends most time on them, and no router changes them."""
    from acmoe.experts.mlp import ExpertMLP
    from acmoe.ops.dispatch import use_backend

    forward = ExpertMLP.forward

    def by_torch(*arguments, **options):
        with use_backend("torch"):
            return forward(*arguments, **options)

    if not torch.cuda.is_available():
        monkeypatch.setattr(ExpertMLP, "forward", by_torch)
