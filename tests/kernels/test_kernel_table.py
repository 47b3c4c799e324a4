"""Every kernel that is registered for an op against the op's definition, forward and backward.

The table CASES (op_cases.py) has a case for each op; an op that gets a kernel and no case fails the
first test. Kernels that this machine cannot run (a package or a card is missing) are skipped by
name.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import CASES, Case, Draw, case_of
from torch import Tensor

import acmoe.ops
from acmoe.ops.dispatch import DEFINITION, OPS, use_backend

pytest.importorskip("triton")

for _module in pkgutil.walk_packages(acmoe.ops.__path__, "acmoe.ops."):
    if not {"triton", "hopper", "device"} & set(_module.name.split(".")):
        importlib.import_module(_module.name)  # registers its kernels

KERNELS = [
    (op.name, kernel.name)
    for op in OPS.values()
    for kernel in op.kernels
    if kernel.name != DEFINITION
]


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def outcome(run: Callable[..., Any], case: Case) -> list[Tensor]:
    """Results, what was written in place, and gradients of all differentiable results."""
    results = tensors_in(run(*case.args, **case.kwargs))
    differentiable = [r for r in results if r.requires_grad and r.is_floating_point()]
    found = [r.detach() for r in results if r.numel() and r.stride() != (0, 0)]
    found += [tensor.clone() for tensor in case.written]
    if differentiable and case.leaves:
        generator = torch.Generator().manual_seed(7)
        upstream = [torch.randn(r.shape, generator=generator).to(r) for r in differentiable]
        found += torch.autograd.grad(differentiable, case.leaves, upstream, allow_unused=True)
    return [tensor for tensor in found if tensor is not None]


def compare(op: str, kernel: str, seed: int, device: str) -> None:
    case = case_of(op, kernel)(Draw(seed, device))
    chosen = next(one for one in OPS[op].kernels if one.name == kernel)
    with use_backend(kernel):
        reason = OPS[op].reasons(*case.args, **case.kwargs)[kernel]
        if reason is not None:
            pytest.skip(f"{op}: {kernel} cannot serve here, {reason}")
        found = outcome(chosen.run, case)
    again = case_of(op, kernel)(
        Draw(seed, device)
    )  # the first call may have written into its arguments
    with use_backend(DEFINITION):
        wanted = outcome(OPS[op].definition, again)
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        if one.is_floating_point():
            scale = max(1.0, float(other.float().abs().max()))
            assert (one.float() - other.float()).abs().max() <= case.tolerance * scale
        else:
            assert torch.equal(one, other)


def test_every_op_that_has_a_kernel_has_a_case() -> None:
    assert {op for op, _ in KERNELS} == set(CASES)


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_a_kernel_computes_what_the_definition_says(op: str, kernel: str, device: str) -> None:
    compare(op, kernel, 0, device)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "kernel"), KERNELS)
@settings(max_examples=6)
@given(seed=st.integers(1, 10**6))
def test_so_it_does_for_any_numbers(op: str, kernel: str, seed: int) -> None:
    compare(op, kernel, seed, "cuda" if torch.cuda.is_available() else "cpu")
