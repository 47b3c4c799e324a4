"""Theorem 1: the feature weights that minimise dispersion plus lambda * KL(uniform || weights).

The minimiser is w_q = (lambda / d) / (s_q + alpha), where alpha makes the d weights sum to one.
This equation for alpha has one root between any two neighbouring poles; only the largest root gives
positive weights.
"""

import math

import torch
from torch import Tensor

from acmoe.errors import UserError, check
from acmoe.ops.checks import has_values
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op, transforming, untraced
from acmoe.ops.native.library import SERVED, functions, missing
from acmoe.ops.precision import wide_dtype

# Newton steps, a fixed number, so that the device never waits for the host. Convergence from the
# left is quadratic: the hardest spectra found (dispersions whose number grows with their size) need
# 15; see the tests.
_STEPS = 24
# A dispersion this many times lambda gets weight 0; its square must not overflow.
_MAX_RATIO = {torch.float64: 1e140, torch.float32: 1e18}


def optimal_weights(dispersion: Tensor, strength: float | Tensor) -> Tensor:
    """Return the optimal feature weights (C, D) of Theorem 1; each row sums to one.

    dispersion   (C, D) non-negative, zeros and ties allowed, any leading dimensions
    strength     lambda > 0, one number or a tensor that broadcasts to (C, 1), in the unit of the
                 dispersion. Large: equal weights. The harmonic mean of a row: weights exactly
                 proportional to 1/s. Small: all weight on the features of least dispersion.

    Differentiable in both by the implicit function theorem: the iteration is not unrolled.

    >>> optimal_weights(torch.tensor([[1.0, 3.0]]), 1.5)  # 1.5 = harmonic mean, so alpha = 0
    tensor([[0.7500, 0.2500]])
    """
    check_strength(strength)
    _check_dispersion(dispersion)
    # float64 if the device has it: dispersions range from a millionth of lambda to a million times
    # it. In float32 the weights have relative errors below 2e-6 (tests/ops/test_narrow_scale.py).
    wide = wide_dtype(dispersion.device)
    lam = _strength_of_rows(strength, dispersion, wide)
    function = _Transformable if transforming() else _OptimalWeights
    weights: Tensor = function.apply(dispersion.to(wide), lam)  # type: ignore[no-untyped-call]
    return weights.to(dispersion.dtype)


def _check_dispersion(dispersion: Tensor) -> None:
    """Raise a UserError for a wrong dtype or shape and, on a CPU, for wrong values."""
    check(
        dispersion.is_floating_point() and dispersion.dim() >= 1 and dispersion.shape[-1] > 0,
        f"dispersion has shape {tuple(dispersion.shape)} and dtype {dispersion.dtype}; "
        "pass floating-point (clusters, features) with at least one feature",
    )
    traced = torch.compiler.is_compiling() or transforming()
    if dispersion.device.type == "cpu" and has_values(dispersion) and not traced:
        valid = torch.isfinite(dispersion) & (dispersion >= 0)
        if not valid.all():
            bad = dispersion[~valid].flatten()[0].item()
            check(False, f"dispersion holds {bad}; every entry must be finite and at least 0")


def _strength_of_rows(strength: float | Tensor, dispersion: Tensor, wide: torch.dtype) -> Tensor:
    """Return lambda (C, 1) of each row of the dispersion, in the dtype `wide`."""
    if isinstance(strength, Tensor):
        lam = strength.to(dispersion.device, wide)
    else:  # fill on the device: a copy from the host would synchronise
        strength = math.inf if strength > torch.finfo(wide).max else strength
        lam = dispersion.new_full((), strength, dtype=wide)
    if wide == torch.float32:
        lam = lam.clamp(min=torch.finfo(wide).tiny)  # a lambda that float32 rounds to 0
    rows = (*dispersion.shape[:-1], 1)
    pairs = zip(reversed(lam.shape), reversed(rows), strict=False)
    check(
        lam.dim() <= len(rows) and all(size in (1, wanted) for size, wanted in pairs),
        f"strength has shape {tuple(lam.shape)}; pass one number, or one for each row: {rows}",
    )
    return lam.expand(rows)


def check_strength(strength: float | Tensor) -> None:
    """Raise a UserError unless lambda is positive and finite."""
    if isinstance(strength, Tensor):
        if strength.device.type != "cpu" or torch.compiler.is_compiling() or transforming():
            return
        check(
            bool((strength > 0).all() and torch.isfinite(strength).all()),
            f"strength={strength.tolist()}; lambda of Theorem 1 must be positive and finite",
        )
    elif not 0 < strength < math.inf:  # the only test that torch.compile(dynamic=True) can trace
        raise UserError(
            f"strength={strength}; lambda of Theorem 1 must be positive and finite "
            "(None means the paper's 1/s)"
        )


def solve(s: Tensor, lam: Tensor) -> Tensor:
    """Return (s + alpha) / lambda at the largest root, without forming alpha.

    In units of lambda, with t = s - min(s) and u = alpha + min(s) > 0, the equation is H(t + u) =
    1, where H is the harmonic mean. H is concave and increasing in u, so Newton's method from the
    left never passes the root. t + u has no cancellation, where s + alpha would.
    """
    d = s.shape[-1]
    t = ((s - s.amin(-1, keepdim=True)) / lam).clamp(max=_MAX_RATIO[s.dtype])
    # u <= H(t + u) <= min(d * u, u + mean(t)) brackets the root from below.
    u = (1 - t.mean(-1, keepdim=True)).clamp(min=1 / d)
    for _ in range(_STEPS):
        inverse = 1 / (t + u)
        mean = inverse.mean(-1, keepdim=True)
        slope = (inverse / mean).square().mean(-1, keepdim=True)  # dH/du, between 1 and d
        # Rounding may move a converged u by an ulp; clamp it to (0, 1].
        u = (u + ((1 - 1 / mean) / slope).clamp(min=0)).clamp(max=1)
    return t + u


@op
def theorem_weights(s: Tensor, lam: Tensor) -> Tensor:
    """Return `optimal_weights` (X, D) of dispersions (X, D) and lambdas (X, 1)."""
    weights = 1 / solve(s, lam)
    return weights / weights.sum(-1, keepdim=True)


def _not_float64(s: Tensor) -> str | None:
    """Return the reason why a kernel cannot compute the weights, or None."""
    if not untraced(s):
        return "something traces the call"
    if s.dtype != torch.float64:
        return f"it takes float64, not {s.dtype}"
    return "there are no numbers" if s.numel() == 0 else None


def _not_on_cuda(s: Tensor, lam: Tensor) -> str | None:
    # Its tensors are float64, which the kernels of tokens do not take.
    return triton_unsupported(lam, any_dtype=True) or _not_float64(s)


def _not_native(s: Tensor, lam: Tensor) -> str | None:
    if s.device.type != "cpu" or lam.device.type != "cpu":
        return "it is for CPUs"
    return _not_float64(s) or missing()


@theorem_weights.register("triton", unsupported=_not_on_cuda, by_triton=True)
def _weights_by_triton(s: Tensor, lam: Tensor) -> Tensor:
    from acmoe.ops.statistics.triton.optimum import newton_weights

    rows = s.contiguous().view(-1, s.shape[-1])
    most = _MAX_RATIO[torch.float64]
    return newton_weights(rows, lam.contiguous().view(-1), _STEPS, most).view(s.shape)


@theorem_weights.register("native", unsupported=_not_native)
def _weights_in_c(s: Tensor, lam: Tensor) -> Tensor:
    s, lam = s.contiguous(), lam.contiguous()
    weights = torch.empty_like(s)
    code = functions().theorem_weights(
        *(s.data_ptr(), lam.data_ptr(), lam.numel(), s.shape[-1], _STEPS),
        *(_MAX_RATIO[torch.float64], weights.data_ptr()),
    )
    assert code == SERVED
    return weights


class _OptimalWeights(torch.autograd.Function):
    """Weights of Theorem 1, with their gradient by the implicit function theorem."""

    @staticmethod
    def forward(s: Tensor, lam: Tensor) -> Tensor:
        return theorem_weights(s, lam)

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
        return grad_s, grad_lam


class _Transformable(_OptimalWeights):
    """`_OptimalWeights` with a forward-mode derivative and a batching rule, for `torch.func`.

    It is a class of its own, because `torch.compile` cannot trace a function with a `jvp`.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output, inputs[1])
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def jvp(ctx, ds, dlam):  # type: ignore[no-untyped-def]
        # The formulas of `backward`, along a direction.
        w, lam = ctx.saved_tensors
        d, square = w.shape[-1], w.square()
        total = square.sum(-1, keepdim=True)
        found = torch.zeros_like(w)
        if ds is not None:
            dalpha = -(square * ds).sum(-1, keepdim=True) / total
            found = found - (d / lam) * square * (ds + dalpha)
        if dlam is not None:
            found = found + w * dlam / lam - square * dlam / (lam * total)
        return found
