"""Check Proposition 1: does the AC router misassign fewer noisy tokens than the plain one?

The answer depends on the tokens that the scale is measured on. Let p_q be the share of feature q in
the squared gap, E the mean under p, sigma the standard deviations, and tau that of the noise:

    plain          z^2 ~ 1 / (E[sigma^2] + tau^2)
    clean scale    z^2 ~ E[1/sigma]^2 / (1 + tau^2 E[1/sigma^2])         s = sigma
    noisy scale    z^2 ~ E[1/sqrt(sigma^2 + tau^2)]^2                    s^2 = sigma^2 + tau^2

By Jensen's inequality the third, and the second at tau = 0, are at least the first. As tau grows,
the ratio of the second to the first tends to E[1/sigma]^2 / E[1/sigma^2], which is at most one by
Jensen's inequality.

D features, X independent draws. Every z is to be multiplied by half the length of the gap.
"""

import torch
from torch import Tensor

from acmoe.lab.theory.check import Check, judge
from acmoe.lab.theory.misassignment import misassignment

STATEMENT = "P(AC router wrong) <= P(plain router wrong)"
ROUNDING = 1e-12


def plain_z(share: Tensor, std: Tensor, noise: float | Tensor) -> Tensor:
    """Return z of the Euclidean nearest mean.

    Features are along the last axis; `noise` broadcasts over the other axes.
    """
    return 1 / ((share * std.square()).sum(-1) + noise**2).sqrt()


def clean_scale_z(share: Tensor, std: Tensor, noise: float | Tensor) -> Tensor:
    """Return z of the nearest mean with the scale 1/s measured on tokens without noise."""
    variance = 1 + noise**2 * (share / std.square()).sum(-1)
    return (share / std).sum(-1) / variance.sqrt()


def noisy_scale_z(share: Tensor, std: Tensor, noise: float | Tensor) -> Tensor:
    """Return z of the nearest mean with the scale 1/s measured on the noisy tokens themselves."""
    tau = torch.as_tensor(noise, dtype=std.dtype)[..., None]
    return (share / (std.square() + tau**2).sqrt()).sum(-1)


def crossing_noise(share: Tensor, std: Tensor) -> Tensor:
    """Return the noise at which a clean scale errs as often as no scale.

    It is infinite if all deviations are equal.
    """
    first = (share / std).sum(-1)
    second = (share / std.square()).sum(-1)
    variance = (share * std.square()).sum(-1)
    return ((first.square() * variance - 1) / (second - first.square())).sqrt()


def random_mixtures(generator: torch.Generator, draws: int, dim: int) -> tuple[Tensor, Tensor]:
    """Draw shares of the squared gap and, independently, standard deviations, (X, D) each."""
    gap_XD = torch.randn(draws, dim, generator=generator, dtype=torch.float64)
    std_XD = torch.randn(draws, dim, generator=generator, dtype=torch.float64).exp()
    return gap_XD.square() / gap_XD.square().sum(-1, keepdim=True), std_XD


def disagreement_with_lemma(share_XD: Tensor, std_XD: Tensor, noise: float) -> float:
    """Return the largest difference in probability between the formulas above and Lemma 2."""
    length = 2.0  # length of the gap, so that Phi(-z length / 2) = Phi(-z)
    worst = 0.0
    for share_D, std_D in zip(share_XD[:10], std_XD[:10], strict=True):
        noisy_D = (std_D.square() + noise**2).sqrt()
        for z, scale_D in (
            (plain_z(share_D, std_D, noise), torch.ones_like(std_D)),
            (clean_scale_z(share_D, std_D, noise), 1 / std_D),
            (noisy_scale_z(share_D, std_D, noise), 1 / noisy_D),
        ):
            lemma = misassignment(length * share_D.sqrt(), torch.diag(noisy_D.square()), scale_D)
            worst = max(worst, (torch.special.ndtr(-z * length / 2) - lemma).abs().item())
    return worst


def check_without_noise(seed: int = 0, draws: int = 5000, dim: int = 8) -> Check:
    generator = torch.Generator().manual_seed(seed)
    share_XD, std_XD = random_mixtures(generator, draws, dim)
    ratio_X = clean_scale_z(share_XD, std_XD, 0.0) / plain_z(share_XD, std_XD, 0.0)
    least = ratio_X.min().item()
    error = disagreement_with_lemma(share_XD, std_XD, 0.0)
    confirmed = error <= ROUNDING
    holds = least >= 1 - ROUNDING
    return Check(
        name="Proposition 1, no noise",
        statement=STATEMENT,
        setting=f"{draws} diagonal mixtures, gap independent of the dispersion",
        measured=f"margin z grows {least:.3f} times at least, {ratio_X.median().item():.2f} times "
        "in the median",
        figures={
            "draws": draws,
            "violations": int((ratio_X < 1 - ROUNDING).sum()),
            "least_margin_ratio": least,
            "median_margin_ratio": ratio_X.median().item(),
        },
        verdict=judge(
            confirmed,
            "holds, and needs no separation assumption" if holds else "fails as printed",
            f"the closed form is {error:.1e} away from Lemma 2",
        ),
        holds_as_printed=holds if confirmed else None,
        confirmed=confirmed,
        note="It follows from Jensen's inequality, not from Lemma 1: the gap may lie along any "
        "features.",
    )


def check_noisy_scale(seed: int = 0, draws: int = 2000, dim: int = 8) -> Check:
    generator = torch.Generator().manual_seed(seed)
    share_XD, std_XD = random_mixtures(generator, draws, dim)
    levels = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
    ratios = [
        noisy_scale_z(share_XD, std_XD, tau) / plain_z(share_XD, std_XD, tau) for tau in levels
    ]
    least = torch.stack(ratios).min().item()
    error = max(disagreement_with_lemma(share_XD, std_XD, tau) for tau in levels)
    confirmed = error <= ROUNDING
    holds = least >= 1 - ROUNDING
    return Check(
        name="Proposition 1, scale from the noisy tokens",
        statement=STATEMENT,
        setting=f"{draws} mixtures, noise {levels[0]:g} to {levels[-1]:g}, s^2 = sigma^2 + tau^2",
        measured=f"margin z never shrinks: ratio at least 1 + {least - 1:.0e}",
        figures={"draws": draws, "noise": levels, "least_margin_ratio": least},
        verdict=judge(
            confirmed,
            "holds" if holds else "fails as printed",
            f"the closed form is {error:.1e} away from Lemma 2",
        ),
        holds_as_printed=holds if confirmed else None,
        confirmed=confirmed,
        note="This is the case of statistics='batch', which measures the contaminated tokens. The "
        "gain shrinks as the noise makes all features equally loose.",
    )


def check_clean_scale(seed: int = 0, draws: int = 2000, dim: int = 8) -> Check:
    generator = torch.Generator().manual_seed(seed)
    share_XD, std_XD = random_mixtures(generator, draws, dim)
    cross_X = crossing_noise(share_XD, std_XD)
    below_X, above_X = (
        clean_scale_z(share_XD, std_XD, tau_X) / plain_z(share_XD, std_XD, tau_X)
        for tau_X in (0.9 * cross_X, 1.1 * cross_X)
    )
    side_X = (below_X > 1) & (above_X < 1)
    far_X = clean_scale_z(share_XD, std_XD, 1e3) / plain_z(share_XD, std_XD, 1e3)
    broken = int((far_X < 1 - ROUNDING).sum())
    error = disagreement_with_lemma(share_XD, std_XD, cross_X.median().item())
    confirmed = bool(side_X.all()) and error <= ROUNDING
    return Check(
        name="Proposition 1, scale from clean tokens",
        statement=STATEMENT,
        setting=f"{draws} mixtures, isotropic noise added after the scale was measured",
        measured=f"reversed above a noise of {cross_X.median().item():.2f} (median, "
        f"{cross_X.min().item():.2f} to {cross_X.max().item():.2f})",
        figures={
            "draws": draws,
            "draws_reversed_at_large_noise": broken,
            "median_crossing_noise": cross_X.median().item(),
            "least_crossing_noise": cross_X.min().item(),
            "worst_margin_ratio": far_X.min().item(),
        },
        verdict=judge(
            confirmed,
            f"fails as printed: {broken} of {draws} reverse at large noise" if broken else "holds",
            "the closed-form crossing does not separate the two cases, "
            f"or the closed forms are {error:.1e} away from Lemma 2",
        ),
        holds_as_printed=broken == 0 if confirmed else None,
        confirmed=confirmed,
        note="Lemma 1 builds M from the clean cluster, so this is the proposition as printed. A "
        "scale learned on clean text (statistics='running') amplifies the noise on tight features.",
    )
