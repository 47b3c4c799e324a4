"""Student's t distribution, computed from the regularised incomplete beta function.

It is implemented here so that the comparison of runs does not need scipy; tests compare the two.
"""

import math

_STEPS = 300  # limit for the continued fraction, which converges in tens of steps
_TINY = 1e-300  # replaces a denominator of zero


def two_sided_p(t: float, freedom: float) -> float:
    """Return P(|T| >= |t|) for T with `freedom` degrees of freedom."""
    if math.isinf(t):
        return 0.0
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def critical_value(confidence: float, freedom: float) -> float:
    """Return the t for which P(|T| < t) = `confidence`."""
    low, high = 0.0, 1.0
    while two_sided_p(high, freedom) > 1 - confidence:
        low, high = high, 2 * high
    for _ in range(200):  # bisection of an interval of floats converges well before
        middle = (low + high) / 2
        if two_sided_p(middle, freedom) > 1 - confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return I_x(a, b), by the continued fraction on the side where it converges fast."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    """Return 1 / (1 + d1 / (1 + d2 / (1 + ...))), evaluated by Lentz's method.

    d_2m = m (b - m) x / ((a + 2m - 1)(a + 2m)), d_2m+1 = -(a + m)(a + b + m) x / ((a + 2m)(a + 2m
    + 1)).
    """
    value, c, d = 1.0, 1.0, 0.0
    for step in range(_STEPS):
        m = step // 2
        if step == 0:
            part = 1.0
        elif step % 2 == 0:
            part = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            part = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away_from_zero(1 + part * d)
        c = _away_from_zero(1 + part / c)
        value *= c * d
        if abs(1 - c * d) < 1e-15:
            break
    return value - 1


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
