"""Where kernels in Gluon can run, and whether the Triton at hand compiles them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from acmoe.errors import UserError

GPU = torch.device("cuda")
COMPILE = Path(__file__).parents[1] / "compile_gluon.py"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """The module, on a Hopper card with the triton that its kernels were tested with."""
    triton = pytest.importorskip("triton")
    from acmoe.kernels import hopper

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return hopper


def test_on_a_hopper_with_a_known_triton_nothing_is_in_the_way(hopper):
    assert hopper.gluon_obstacle(GPU) is None


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        ("torch.cuda", "get_device_capability", lambda *_: (8, 0), "compute capability 9"),
        ("torch.cuda", "get_device_capability", lambda *_: (10, 0), "compute capability 9"),
        ("torch.version", "hip", "6.2", "CUDA device, not 6.2"),
        ("triton", "__version__", "3.7.0", "not yet with 3.7.0; ACMOE_GLUON=try lets them"),
        ("triton", "__version__", "3.9.0", "triton 3.6, not 3.9.0"),
        ("triton", "__version__", "3.60.0", "triton 3.6, not 3.60.0"),
    ],
)
def test_every_other_machine_says_why_not(hopper, monkeypatch, owner, name, value, reason):
    monkeypatch.setattr(f"{owner}.{name}", value)
    assert reason in hopper.gluon_obstacle(GPU)


def test_a_cpu_is_named(hopper):
    assert hopper.gluon_obstacle(torch.device("cpu")) == "its kernels need a CUDA device, not cpu"


def test_a_triton_that_compiles_them_may_be_tried(hopper, monkeypatch):
    monkeypatch.setenv("ACMOE_GLUON", "try")
    assert hopper.gluon_obstacle(GPU) is None
    monkeypatch.setattr("triton.__version__", "3.7.1")
    assert hopper.gluon_obstacle(GPU) is None
    monkeypatch.setattr("triton.__version__", "3.9.0")
    assert hopper.gluon_obstacle(GPU) is not None


def test_they_can_be_turned_off(hopper, monkeypatch):
    monkeypatch.setenv("ACMOE_GLUON", "never")
    assert hopper.gluon_obstacle(GPU) == "ACMOE_GLUON=never turns its kernels off"
    monkeypatch.setenv("ACMOE_GLUON", "yes")
    with pytest.raises(UserError, match="ACMOE_GLUON='yes' is unknown; choose auto, try or never"):
        hopper.gluon_obstacle(GPU)


def compiled(*names):
    """What tests/compile_gluon.py says of kernels, compiled for a Hopper card by a process without
    Triton's interpreter; nothing of those that this Triton cannot compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(COMPILE), *names],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_compiled(found):
    """Products by whole warpgroups, tiles by the copy engine, and room in shared memory."""
    for name, kernel in found.items():
        assert kernel["products"] > 0 and kernel["copies"] > 0, name
        assert kernel["shared"] <= 227 * 1024, name


def test_a_product_by_a_ring_compiles_for_a_hopper_card():
    pytest.importorskip("triton.experimental.gluon")
    found = compiled("weights")
    assert len(found) == 1
    check_compiled(found)


@pytest.mark.slow
def test_every_ring_of_the_table_and_attention_s_backward_compile_for_a_hopper_card():
    pytest.importorskip("triton.experimental.gluon")
    found = compiled("table", "keys")
    assert len([name for name in found if name.startswith("ring_")]) >= 15
    assert len([name for name in found if name.startswith("keys")]) == 2
    check_compiled(found)


@pytest.mark.slow
def test_attention_s_forward_compiles_for_a_hopper_card():
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith(("3.6.", "3.7.")):
        pytest.skip(f"triton {triton.__version__} refuses its layouts, and it does not run there")
    found = compiled("forward")
    assert len(found) == 4
    check_compiled(found)
