"""The scale and Theorem 1 in float32 alone, against float64: a device may have no float64.

C clusters, D features.
"""

import itertools

import pytest
import torch
from torch import Tensor

from acmoe.ops.precision import wide_dtype
from acmoe.ops.statistics.optimum import optimal_weights
from acmoe.ops.statistics.scale import NORMALIZATIONS, scale_from_dispersion
from without_float64 import without_float64

ERROR = 2e-6  # relative, of the scale and of the weights; the docstrings of both state it
MANY = 100 * torch.ones(8)


def spectra(dim: int) -> dict[str, Tensor]:
    """(8, D) float32 dispersions: ordinary ones, wide ranges, equal ones, tiny and huge ones."""
    generator = torch.Generator().manual_seed(dim)
    uniform = torch.rand(8, dim, generator=generator, dtype=torch.float64)
    growing = torch.linspace(-4, 4, dim, dtype=torch.float64).expand(8, -1)
    found = {
        "ordinary": 0.1 + uniform,
        "seven decades": 10 ** (7 * uniform - 3.5),
        "growing": 10 ** (growing + uniform),
        "equal": torch.full((8, dim), 0.3, dtype=torch.float64),
        "one alone": 1 + 1e4 * (torch.arange(dim) > 0) * uniform,
        "rows apart": uniform * 10 ** torch.linspace(-30, 30, 8, dtype=torch.float64)[:, None],
        "tiny": 1e-36 * (1 + uniform),
        "huge": 1e34 * (1 + uniform),
    }
    return {name: value.float() for name, value in found.items()}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected.double()).abs() / expected.double()).max())


@pytest.mark.parametrize("dim", [pytest.param(2, marks=pytest.mark.slow), 1024])
def test_the_scale_in_float32_is_that_of_float64(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = itertools.product(NORMALIZATIONS, (None, 1.5), (0.0, 1e-4), (1e-3, 1e-12))
    cases = [
        (name, s, {"normalize": normalize, "clamp": clamp, "eps": eps, "floor": floor})
        for (normalize, clamp, eps, floor), (name, s) in itertools.product(
            options, spectra(dim).items()
        )
    ]
    expected = [scale_from_dispersion(s, MANY, **options) for _, s, options in cases]  # type: ignore[arg-type]
    with without_float64(monkeypatch):
        found = [scale_from_dispersion(s, MANY, **options) for _, s, options in cases]  # type: ignore[arg-type]
    for (name, _, options), one, other in zip(cases, found, expected, strict=True):
        assert relative_error(one, other) < ERROR, (name, options)


@pytest.mark.parametrize("dim", [pytest.param(2, marks=pytest.mark.slow), 1024])
def test_theorem_1_in_float32_is_that_of_float64(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ordinary", "seven decades", "growing", "equal", "one alone", "tiny", "huge")
    cases = [(name, lam) for name in names for lam in (1e-6, 1.0, 1e6, 1e300)]
    dispersions = spectra(dim)
    expected = [optimal_weights(dispersions[name], lam) for name, lam in cases]
    with without_float64(monkeypatch):
        found = [optimal_weights(dispersions[name], lam) for name, lam in cases]
    for case, one, other in zip(cases, found, expected, strict=True):
        # A weight below 1e-15 of its row's sum is 0 for every purpose.
        floor = 1e-15 * torch.ones_like(other)
        assert relative_error(one.maximum(floor), other.maximum(floor)) < ERROR, case


def test_gradients_in_float32_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))

    ordinary = spectra(64)["ordinary"].requires_grad_()

    def gradient(strength: float | None, clamp: float | None) -> Tensor:
        scale = scale_from_dispersion(ordinary, MANY, strength=strength, clamp=clamp)
        (found,) = torch.autograd.grad((scale * upstream).sum(), ordinary)
        return found

    for strength, clamp in ((None, None), (None, 1.2), (0.4, None)):
        expected = gradient(strength, clamp)
        with without_float64(monkeypatch):
            found = gradient(strength, clamp)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_what_carries_no_information_gets_ones_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    s = torch.tensor([[1.0, 3.0], [0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0], [2.0, 1.0]])
    count = torch.tensor([5.0, 5.0, 5.0, 5.0, 1.0])
    with without_float64(monkeypatch):
        for normalize in NORMALIZATIONS:
            scale = scale_from_dispersion(s, count, normalize=normalize)
            assert scale[1:].eq(1).all()
    # 1/s = (1, 1/3) over its mean 2/3.
    torch.testing.assert_close(scale[0], torch.tensor([1.5, 0.5]))


def test_only_a_device_without_float64_gets_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("cpu", "cuda", "mps")
    found = [wide_dtype(torch.device(kind)) for kind in kinds]
    assert found == [torch.float64, torch.float64, torch.float32]

    class Arc:
        has_fp64 = False

    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: Arc)
    assert wide_dtype(torch.device("xpu")) == torch.float32
    Arc.has_fp64 = True
    assert wide_dtype(torch.device("xpu")) == torch.float64
