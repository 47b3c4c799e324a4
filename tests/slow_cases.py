"""Choose what of a test `make test` runs; `make test-all` runs every case of every test."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import pytest
import torch

ParameterSet = type(pytest.param())


def mostly_slow(
    names: str | Sequence[str],
    cases: Iterable[Any],
    *,
    keep: Container[int] = (0,),
    gpu: Container[int] = (),
    **options: Any,
) -> pytest.MarkDecorator:
    """Mark the cases slow that are not at one of the places `keep`: they repeat a truth.

    Those at the places `gpu` are slow in an interpreter alone: where a CUDA device is, they are
    not slow, and `make test-gpu` runs them.
    """
    marked = []
    for place, case in enumerate(cases):
        if not isinstance(case, ParameterSet):
            case = pytest.param(case) if isinstance(names, str) else pytest.param(*case)
        kept = place in keep or (place in gpu and torch.cuda.is_available())
        marks = [*case.marks] if kept else [*case.marks, pytest.mark.slow]
        marked.append(case._replace(marks=marks))
    return pytest.mark.parametrize(names, marked, **options)


def slow_on_cpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test slow where there is no CUDA device; `make test-gpu` runs it.

    It is for a truth that says little of interpreted kernels: the interpreter runs the programs of
    a kernel in one order, and gives equal bits twice whatever they do.
    """
    return test if torch.cuda.is_available() else pytest.mark.slow(test)
