"""Where kernels in Gluon can run."""

import pytest
import torch

from acmoe.errors import UserError

GPU = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """The module, on a Hopper card with the triton that its kernels were tested with."""
    triton = pytest.importorskip("triton")
    from acmoe.ops.device import hopper

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("ACMOE_GLUON", raising=False)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return hopper


def test_on_a_hopper_with_a_known_triton_nothing_is_in_the_way(hopper):
    assert hopper.gluon_unsupported(GPU) is None


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        ("torch.cuda", "get_device_capability", lambda *_: (8, 0), "compute capability 9"),
        ("torch.cuda", "get_device_capability", lambda *_: (10, 0), "compute capability 9"),
        ("torch.version", "hip", "6.2", "NVIDIA GPU, not an AMD one (ROCm 6.2)"),
        ("triton", "__version__", "3.7.0", "not yet with 3.7.0; ACMOE_GLUON=try lets them"),
        ("triton", "__version__", "3.9.0", "triton 3.6, not 3.9.0"),
        ("triton", "__version__", "3.60.0", "triton 3.6, not 3.60.0"),
    ],
)
def test_every_other_machine_says_why_not(hopper, monkeypatch, owner, name, value, reason):
    monkeypatch.setattr(f"{owner}.{name}", value)
    assert reason in hopper.gluon_unsupported(GPU)


def test_a_cpu_is_named(hopper):
    assert (
        hopper.gluon_unsupported(torch.device("cpu")) == "its kernels need a CUDA device, not cpu"
    )


def test_a_triton_that_compiles_them_may_be_tried(hopper, monkeypatch):
    monkeypatch.setenv("ACMOE_GLUON", "try")
    assert hopper.gluon_unsupported(GPU) is None
    monkeypatch.setattr("triton.__version__", "3.7.1")
    assert hopper.gluon_unsupported(GPU) is None
    monkeypatch.setattr("triton.__version__", "3.9.0")
    assert hopper.gluon_unsupported(GPU) is not None


def test_they_can_be_turned_off(hopper, monkeypatch):
    monkeypatch.setenv("ACMOE_GLUON", "never")
    assert hopper.gluon_unsupported(GPU) == "ACMOE_GLUON=never turns its kernels off"
    monkeypatch.setenv("ACMOE_GLUON", "yes")
    with pytest.raises(UserError, match="ACMOE_GLUON='yes' is unknown; choose auto, try or never"):
        hopper.gluon_unsupported(GPU)
