"""Without a GPU the kernels run in Triton's interpreter, in this process.

Triton chooses between compiler and interpreter when a kernel is defined, by an environment
variable; its own functions (tl.sum and such) are defined when it is imported. The variable is set
for those moments only: elsewhere a CPU keeps the plain PyTorch form.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

VARIABLE = "TRITON_INTERPRET"


def import_triton_to_interpret() -> None:
    # What was imported before (torch._dynamo does) was defined for the compiler: once more. The
    # compiled part of Triton is the same for both, and cannot be loaded twice.
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    os.environ[VARIABLE] = "1"
    try:
        import triton.experimental.gluon.language
        import triton.language  # noqa: F401, defines its functions
    finally:
        del os.environ[VARIABLE]


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
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels imported by a test are interpreted; numpy, which that uses, does not warn of NaN."""
    if not torch.cuda.is_available():
        monkeypatch.setenv(VARIABLE, "1")
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def fresh_choice():
    """`ring_choice`, which remembers what it chose, without memory before and after."""
    pytest.importorskip("triton")
    from acmoe.ops.experts.hopper import choice as ring_choice

    ring_choice._ring.cache_clear()
    yield ring_choice
    ring_choice._ring.cache_clear()


@pytest.fixture
def ring_launch(monkeypatch):
    """The launches; without a GPU their kernels emulated."""
    pytest.importorskip("triton.experimental.gluon")
    from acmoe.ops.experts.hopper import hidden as ring_hidden
    from acmoe.ops.experts.hopper import launch as ring_launch
    from acmoe.ops.experts.hopper import rows as ring_rows
    from acmoe.ops.experts.hopper import tokens as ring_tokens
    from acmoe.ops.experts.hopper import weights as ring_weights

    if not torch.cuda.is_available():
        from gluon_emulator import emulate

        for module, name in (
            (ring_rows, "rows_by_ring"),
            (ring_hidden, "hidden_in_turns"),
            (ring_weights, "weights_together"),
            (ring_tokens, "weights_of_tokens"),
        ):
            monkeypatch.setattr(module, name, emulate(getattr(module, name), seed=1))
    return ring_launch
