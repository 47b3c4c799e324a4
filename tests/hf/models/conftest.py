"""A language model of the library and the same one behind transformers, and prompts for both."""

import pytest
import torch
from hf_cases import language_model, wrapped

import acmoe

STATISTICS = ["running", pytest.param("prefix", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=STATISTICS)
def pair(request):
    """A library model, and the same one behind transformers."""
    model = language_model(acmoe.AdaptiveConfig(statistics=request.param))
    return model, wrapped(model)


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))
