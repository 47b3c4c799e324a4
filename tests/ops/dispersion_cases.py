"""What the tests of the dispersion share: every measure, and the dispersion of a token set."""

import pytest
from torch import Tensor

from acmoe.ops.statistics.dispersion import dispersion
from cases import MEASURES, TokenSet

measures = pytest.mark.parametrize("measure", MEASURES)


def of_tokens(tokens: TokenSet, measure: str) -> Tensor:
    x, assignment, num_clusters, mask = tokens
    return dispersion(x, assignment, num_clusters, measure=measure, token_mask=mask)
