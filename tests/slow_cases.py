"""Parametrize a test so that `make test` runs some of its cases and `make test-all` every one."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest

ParameterSet = type(pytest.param())


def mostly_slow(
    names: str | Sequence[str],
    cases: Iterable[Any],
    *,
    keep: Container[int] = (0,),
    **options: Any,
) -> pytest.MarkDecorator:
    """Mark the cases slow that are not at one of the places `keep`: they repeat a truth."""
    marked = []
    for place, case in enumerate(cases):
        if not isinstance(case, ParameterSet):
            case = pytest.param(case) if isinstance(names, str) else pytest.param(*case)
        marks = [*case.marks] if place in keep else [*case.marks, pytest.mark.slow]
        marked.append(case._replace(marks=marks))
    return pytest.mark.parametrize(names, marked, **options)
