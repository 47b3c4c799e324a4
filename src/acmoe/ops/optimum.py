"""Theorem 1: the feature weights that minimise dispersion plus lambda * KL(uniform || weights).

The minimiser is w_q = (lambda / d) / (s_q + alpha), alpha making the weights sum to one. That
equation has a root between any two neighbouring poles; only the largest gives positive weights.
"""

import math

import torch
from torch import Tensor

from acmoe.errors import check

# Newton steps, a fixed number so that no step waits for the host. Quadratic from the left: the
# hardest spectra found (dispersions whose number grows with their size) need 12; see the tests.
_STEPS = 24


def optimal_weights(dispersion: Tensor, strength: float | Tensor) -> Tensor:
    """Optimal feature weights (C, D), rows summing to one (Theorem 1).

    dispersion   (C, D) non-negative; zeros and ties are fine (leading dimensions may be any)
    strength     lambda > 0, one number or a tensor that broadcasts to (C, 1), in the unit of the
                 dispersion. Large: equal weights. The harmonic mean of a row: weights exactly
                 proportional to 1/s. Small: all weight on the tightest features.

    Differentiable in both by the implicit function theorem: the root is not unrolled.

    >>> optimal_weights(torch.tensor([[1.0, 3.0]]), 1.5)  # 1.5 = harmonic mean, so alpha = 0
    tensor([[0.7500, 0.2500]])
    """
    check_strength(strength)
    check(
        dispersion.is_floating_point() and dispersion.dim() >= 1 and dispersion.shape[-1] > 0,
        f"dispersion has shape {tuple(dispersion.shape)} and dtype {dispersion.dtype}; "
        "pass floating-point (clusters, features) with at least one feature",
    )
    if dispersion.device.type == "cpu" and not torch.compiler.is_compiling():
        valid = torch.isfinite(dispersion) & (dispersion >= 0)
        if not valid.all():
            bad = dispersion[~valid].flatten()[0].item()
            check(False, f"dispersion holds {bad}; every entry must be finite and at least 0")
    lam = torch.as_tensor(strength, dtype=torch.float64, device=dispersion.device)
    lam = lam.expand(*dispersion.shape[:-1], 1) if lam.dim() == 0 else lam
    # float64 inside: the root meets dispersions a millionth of lambda and a million times it.
    weights: Tensor = _OptimalWeights.apply(dispersion.double(), lam)
    return weights.to(dispersion.dtype)


def check_strength(strength: float | Tensor) -> None:
    if isinstance(strength, Tensor):
        if strength.device.type != "cpu" or torch.compiler.is_compiling():
            return
        check(
            bool((strength > 0).all() and torch.isfinite(strength).all()),
            f"strength={strength.tolist()}; lambda of Theorem 1 must be positive and finite",
        )
    else:
        check(
            math.isfinite(strength) and strength > 0,
            f"strength={strength}; lambda of Theorem 1 must be positive and finite "
            "(None means the paper's 1/s)",
        )


def solve(s: Tensor, lam: Tensor) -> Tensor:
    """s + alpha at the largest root, without ever forming alpha.

    With t = s - min(s) and u = alpha + min(s) > 0 the equation is H(t + u) = lambda, H the harmonic
    mean. H is concave and increasing in u, so Newton from the left never passes the root; and
    t + u has no cancellation, where s + alpha would.
    """
    d = s.shape[-1]
    t = s - s.amin(-1, keepdim=True)
    # u <= H(t + u) <= min(d * u, u + mean(t)) brackets the root from below.
    u = torch.maximum(lam / d, lam - t.mean(-1, keepdim=True))
    for _ in range(_STEPS):
        inverse = 1 / (t + u)
        mean = inverse.mean(-1, keepdim=True)
        slope = (inverse / mean).square().mean(-1, keepdim=True)  # dH/du, between 1 and d
        # Rounding may push a converged u by an ulp; it is never allowed to leave (0, lambda].
        u = torch.minimum(u + ((lam - 1 / mean) / slope).clamp(min=0), lam)
    return t + u


class _OptimalWeights(torch.autograd.Function):
    @staticmethod
    def forward(s: Tensor, lam: Tensor) -> Tensor:
        shifted = solve(s, lam)
        weights = (lam / s.shape[-1]) / shifted
        return weights / weights.sum(-1, keepdim=True)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output, inputs[1])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        # From sum_q 1/(s_q + alpha) = d/lambda:  dalpha = (-sum w^2 ds + dlambda / d) / sum w^2,
        # and dw = w dlambda/lambda - (d/lambda) w^2 (ds + dalpha).
        w, lam = ctx.saved_tensors
        square = w.square()
        centre = (grad * square).sum(-1, keepdim=True) / square.sum(-1, keepdim=True)
        grad_s = -(w.shape[-1] / lam) * square * (grad - centre)
        grad_lam = ((grad * w).sum(-1, keepdim=True) - centre) / lam
        # A strength with its own broadcast shape gets its sum.
        extra = [i for i, (a, b) in enumerate(zip(lam.shape, grad_lam.shape, strict=True)) if a < b]
        return grad_s, grad_lam.sum(extra, keepdim=True) if extra else grad_lam
