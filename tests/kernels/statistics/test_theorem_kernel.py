"""Theorem 1's weights by kernels, where comparisons would lose a NaN."""

import math

import pytest
import torch

from acmoe.ops.native.library import missing
from acmoe.ops.statistics.optimum import theorem_weights

pytest.importorskip("triton")


@pytest.mark.parametrize("kernel", ["triton", "native"])
@pytest.mark.parametrize(
    ("row", "lam"),
    [
        ([1.0, math.nan, 2.0], 1.0),
        ([math.nan, 1.0, 2.0], 1.0),
        ([1.0, 2.0, 3.0], math.nan),
        ([math.inf, math.inf, math.inf], 1.0),
        ([1.0, math.inf, 1.0], 1.0),  # all weight on the two others
        ([1.0, 2.0, 3.0], math.inf),  # equal weights
    ],
)
def test_a_row_that_is_not_finite_has_the_weights_of_the_definition(
    row: list[float], lam: float, kernel: str, device: str
) -> None:
    if kernel == "native" and (device != "cpu" or missing()):
        pytest.skip("the kernel in C serves CPUs with a compiler")
    s = torch.tensor([row, [1.0, 3.0, 2.0]], dtype=torch.float64, device=device)
    lams = torch.tensor([[lam], [1.5]], dtype=torch.float64, device=device)
    (run,) = [one.run for one in theorem_weights.kernels if one.name == kernel]
    found, wanted = run(s, lams), theorem_weights.definition(s, lams)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15, equal_nan=True)
    assert found[1].isfinite().all()
