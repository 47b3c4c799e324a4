"""A compiler without the graphs of other tests."""

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graph of another test, and no warning of what dynamo itself does while it traces."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        yield
    torch._dynamo.reset()
