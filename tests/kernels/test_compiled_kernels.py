"""Kernels through Triton's compiler, for cards that need not be there: tests/compile_kernels.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "compile_kernels.py"
# Shared memory that a program may have, in KiB: A100; L40 and RTX 40; H100 and H200; B200; RTX 50.
SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="launches on a CPU's tensors alone are compiled"
)


def compiled(capability, *groups):
    """Return the output of a process in which Triton is not interpreted."""
    pytest.importorskip("triton.experimental.gluon")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(capability), *groups]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, kernel in found["compiled"].items():
        assert kernel["shared"] <= SHARED[capability] * 1024, name
        if kernel["gluon"]:  # products by whole warpgroups, tiles by the copy engine
            assert kernel["products"] > 0 and kernel["copies"] > 0, name
    return found


def kernels_of(found):
    return {name.split(",")[0] for name in found["compiled"]}


def test_a_pipelined_gemm_compiles_for_a_hopper_card():
    assert "experts.hopper.weights.weight_gradient_kernel" in kernels_of(compiled(90, "weights"))


@pytest.mark.slow
def test_the_backward_of_a_router_loads_vectors_for_any_even_number_of_experts():
    found = compiled(90, "uneven")
    assert kernels_of(found) >= {
        "route.triton.affinity_gradient._affinity_kernel",
        "route.triton.backward._token_kernel",
        "route.triton.backward._embedding_kernel",
    }
    assert [name for name, kernel in found["compiled"].items() if kernel["narrow"] > 0] == []


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_card():
    import triton

    groups, missing = ["experts", "gates", "text", "images", "measures"], set()
    groups += ["router", "few", "backward", "forward"]
    if not triton.__version__.startswith(("3.6.", "3.7.")):
        # Later ones see no memory as both padded and not, and it does not run there (hopper.py).
        groups.remove("forward")
        missing = {
            "attention.hopper.forward.forward_kernel",
            "attention.hopper.dropout.pair_bits_kernel",
        }
    found = compiled(90, *groups)
    assert len(found["compiled"]) > 200  # a kernel has several uses
    assert kernels_of(found) == set(found["kernels"]) - missing


@pytest.mark.slow
def test_layers_that_no_table_names_compile_and_fit_on_a_hopper_card():
    found = compiled(90, "odd")
    hopper = {name for name, gluon in found["kernels"].items() if gluon}
    experts = {name for name in hopper if name.startswith("experts.")}
    # Tokens are gathered for a weight gradient where gate and up have fewer than 2,048 columns.
    few = {"experts.hopper.up.up_swiglu_kernel", "experts.hopper.columns.columns_kernel"}
    assert experts - few <= kernels_of(found)


@pytest.mark.slow
def test_gradients_in_float32_compile_and_fit_on_a_hopper_card():
    weights = {"hopper.weights.weight_gradient_kernel", "triton.weights.weight_kernel"}
    assert {f"experts.{name}" for name in weights} <= kernels_of(compiled(90, "wide"))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_kernels_compile_and_fit_on_other_cards(capability):
    """As they launch there: by the rule's blocks, in Triton alone.

    Every use of a kernel is compiled for 120, which has the least shared memory, one for others.
    """
    uses = () if capability == 120 else ("--once",)
    found = compiled(capability, *uses, "own", "gates", "text", "images", "measures")
    portable = {name for name, gluon in found["kernels"].items() if not gluon}
    # One is launched before a kernel in Gluon, and one needs blocks for 227 KiB of shared memory.
    missing = {"attention.hopper.dropout.pair_bits_kernel"}
    if SHARED[capability] < 227:
        missing.add("experts.triton.persistent_weights.persistent_weight_kernel")
    assert kernels_of(found) == portable - missing
