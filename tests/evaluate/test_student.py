"""Student's t distribution, against scipy."""

import pytest
from scipy import stats

from acmoe.evaluate.student import critical_value, two_sided_p


@pytest.mark.parametrize("freedom", [1, 2, 2.5, 4, 9, 40])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.776, 12.0, 80.0])
def test_the_t_distribution_is_scipys(t: float, freedom: float) -> None:
    assert two_sided_p(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-10)


@pytest.mark.parametrize("freedom", [*range(1, 31), 4.75, 200])
def test_the_critical_value_is_scipys_quantile(freedom: float) -> None:
    # From any table: 12.706 with one degree of freedom, 2.776 with four, 2.042 with thirty.
    assert critical_value(0.95, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-10)
