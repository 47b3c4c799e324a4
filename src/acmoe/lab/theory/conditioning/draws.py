"""Count in how many random mixtures Proposition 2 holds. Nothing here is proved.

T tokens, D features, E experts (as many as clusters), X independent draws.
"""

import math

import torch
from torch import Tensor

from acmoe.lab.theory.check import Check, Figure, conclude
from acmoe.lab.theory.conditioning.convergence import STATEMENT
from acmoe.lab.theory.conditioning.hessian import Conditioning, conditioning
from acmoe.lab.theory.intervals import family_z, wilson

DRAWS, DIM, EXPERTS, TOKENS = 60, 6, 4, 1200
# name -> width of the deviations, rotated, measure, and the bounds of the share that is expected.
SETTINGS: dict[str, tuple[float, bool, str, tuple[float, float]]] = {
    "aligned": (1.0, False, "mad", (0.9, 1.0)),
    "rotated": (1.0, True, "mad", (0.5, 0.98)),
    "nearly isotropic": (0.02, False, "mad", (0.6, 0.98)),
    "aligned, variance": (1.0, False, "variance", (0.0, 0.5)),
}


def centred_tokens(
    generator: torch.Generator, *, width: float, rotated: bool, draws: int = DRAWS
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw clusters of mean zero and one covariance.

    Standard deviations along the principal axes are log-uniform in 4^(+-width). The axes are the
    features, or random directions if `rotated`.
    Returns tokens (X, T, D), clusters (X, T) and embeddings (X, E, D).
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    exponent_X1D = 2 * torch.rand(draws, 1, DIM, generator=generator, dtype=torch.float64) - 1
    x_XTD = normal(draws, TOKENS, DIM) * 4.0 ** (width * exponent_X1D)
    if rotated:
        x_XTD = x_XTD @ torch.linalg.qr(normal(draws, DIM, DIM)).Q.mT
    by_cluster = x_XTD.view(draws, TOKENS // EXPERTS, EXPERTS, DIM)
    x_XTD = (by_cluster - by_cluster.mean(1, keepdim=True)).view(draws, TOKENS, DIM)
    cluster_XT = (torch.arange(TOKENS) % EXPERTS).expand(draws, TOKENS)
    return x_XTD, cluster_XT, normal(draws, EXPERTS, DIM) / math.sqrt(DIM)


def drawn_conditioning(name: str, seed: int = 0, draws: int = DRAWS) -> Conditioning:
    """Return the condition numbers of a setting of `SETTINGS`."""
    width, rotated, measure, _ = SETTINGS[name]
    generator = torch.Generator().manual_seed(seed)
    tokens = centred_tokens(generator, width=width, rotated=rotated, draws=draws)
    return conditioning(*tokens, measure=measure)


def check_conditioning_draws(seed: int = 0, draws: int = DRAWS) -> Check:
    shares: dict[str, float] = {}
    figures: dict[str, Figure] = {}
    confirmed = True
    for name, (*_, (least, most)) in SETTINGS.items():
        result = drawn_conditioning(name, seed, draws)
        better = int((result.adaptive <= result.plain).sum())
        shares[name] = better / draws
        low, high = wilson(better, draws, family_z(len(SETTINGS), level=0.05))
        confirmed = confirmed and low <= most and high >= least and least <= shares[name] <= most
        confirmed = confirmed and result.hessian_error <= 1e-10
        figures |= _figures(name, result, (low, high))
    return conclude(
        confirmed,
        name="Proposition 2, random embeddings",
        statement=STATEMENT,
        setting=f"{draws} draws each of {TOKENS} centred tokens in {DIM} features, {EXPERTS} "
        f"experts, embeddings N(0, 1/{DIM}), cross-entropy: " + ", ".join(SETTINGS),
        measured="holds in " + ", ".join(f"{share:.0%}" for share in shares.values()),
        figures=figures,
        verdict="observed: mostly with mad, rarely with the variance",
        doubt="the shares are not "
        + ", ".join(f"{a:g} to {b:g}" for *_, (a, b) in SETTINGS.values())
        + ", or autograd is off the written-out Hessian",
        basis="observation",
        holds_as_printed=None,
        note="'With high probability' is not defined in the paper, nor is the distribution it "
        "would be about. These are shares of the draws described, and no more.",
    )


def _figures(name: str, result: Conditioning, interval: tuple[float, float]) -> dict[str, Figure]:
    key = name.replace(", ", "_").replace(" ", "_")
    return {
        f"{key}_share": (result.adaptive <= result.plain).double().mean().item(),
        f"{key}_interval_95": list(interval),
        f"{key}_median_plain": result.plain.median().item(),
        f"{key}_median_adaptive": result.adaptive.median().item(),
        f"{key}_frozen_gate_error": result.frozen_gate_error,
    }
