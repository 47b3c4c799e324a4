"""Check that Eqn. 8 repeats its assignment: M_k* stretches the features that made k* win.

Let the embedding of expert k be nonzero on a block of features of its own only (a vector that all
experts share may be added to each), and let M_j have a constant value m_jk on the block of k, so
that h' M_j e_k = m_jk a_k with the plain affinities a_k = h' e_k. If j has the largest plain
affinity, a_j >= 0 and m_jj >= m_jk, then j wins again, since m_jj a_j >= m_jk a_j >= m_jk a_k. This
is so whether or not j is the right cluster. Tokens whose affinities are all negative may leave.

T tokens, D features, C clusters, E = C experts. An expert's embedding is the mean of its cluster.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.data.synthetic import GaussianClusters
from acmoe.lab.theory.check import Check, Figure, conclude
from acmoe.lab.theory.intervals import agrees, family_z
from acmoe.lab.theory.repeats.blocks import BlockRates, block_rates
from acmoe.lab.theory.rules import adaptive_choice
from acmoe.lab.theory.scale import exact_scale, library_scale

CLUSTERS = GaussianClusters()  # 4 clusters, 16 features, separation 3
# Clusters so close that some tokens have only negative affinities, and some of these leave.
CLOSE = GaussianClusters(separation=1.0)
CLOSE_CONTRASTS = (1.1, 1.5, 2.0)
TOKENS = 40_000
QUADRATURE = 2e-5  # error of the integrals with corners, far below the intervals
STATEMENT = "a first choice of affinity >= 0 is repeated in its own metric M_k*, right or wrong"


def of_blocks(value_CD: Tensor, clusters: GaussianClusters) -> Tensor:
    """Return the values (C, C) of blocks from those of features, which are equal in each block."""
    return value_CD[:, :: clusters.tight_features]


def exact(clusters: GaussianClusters, std_CD: Tensor, *, mended: bool = False) -> BlockRates:
    """Return the exact rates for the means of `clusters` and other deviations."""
    return block_rates(
        clusters.means[0].norm().item(),
        of_blocks(std_CD, clusters),
        of_blocks(exact_scale(std_CD), clusters),
        mended=mended,
    )


def sample(
    clusters: GaussianClusters, std_CD: Tensor, generator: torch.Generator, tokens: int
) -> tuple[Tensor, Tensor]:
    cluster_T = torch.randint(clusters.num_clusters, (tokens,), generator=generator)
    unit_TD = torch.randn(tokens, clusters.dim, generator=generator, dtype=torch.float64)
    return clusters.means[cluster_T] + std_CD[cluster_T] * unit_TD, cluster_T


def inside(count: int, tokens: int, expected: float, z: float) -> bool:
    """Return whether the interval of a measured share contains the expected one."""
    return agrees(count, tokens, expected, z, slack=QUADRATURE)


class _Leaving(NamedTuple):
    """Tokens that leave their first choice, over CLOSE_CONTRASTS."""

    not_negative: int  # tokens that leave a choice of affinity >= 0
    outside: int  # measured shares whose interval does not contain the exact one
    shares: list[float]  # exact share of tokens that leave
    negatives: list[float]  # exact share of tokens whose affinities are all negative


def _leaving(seed: int, tokens: int) -> _Leaving:
    generator = torch.Generator().manual_seed(seed)
    z = family_z(2 * len(CLOSE_CONTRASTS))
    left, outside, shares, negatives = 0, 0, [], []
    for contrast in CLOSE_CONTRASTS:
        clusters = replace(CLOSE, contrast=contrast)
        expected = exact(clusters, clusters.stds)
        x_TD, _ = sample(clusters, clusters.stds, generator, tokens)
        affinity_T, plain_T = (x_TD @ clusters.means.T).max(-1)
        choice_T = adaptive_choice(x_TD, clusters.means, library_scale(clusters.stds), plain_T)
        leaves_T, negative_T = choice_T != plain_T, affinity_T < 0
        left += int((leaves_T & ~negative_T).sum())
        outside += not inside(int(leaves_T.sum()), tokens, expected.left, z)
        outside += not inside(int(negative_T.sum()), tokens, expected.negative, z)
        shares.append(expected.left)
        negatives.append(expected.negative)
    return _Leaving(left, outside, shares, negatives)


def check_confirmation(seed: int = 0, tokens: int = TOKENS) -> Check:
    left, outside, shares, negatives = _leaving(seed, tokens)
    confirmed = left == 0 and outside == 0 and min(shares) > 1e-3
    return conclude(
        confirmed,
        name="Eqn. 8, tight on disjoint blocks",
        statement=STATEMENT,
        setting="each embedding on features of its own, on which its cluster is at least as tight "
        f"as on the others'; close clusters (separation 1), contrast "
        f"{', '.join(f'{c:g}' for c in CLOSE_CONTRASTS)}, {tokens} tokens each",
        measured=f"{left} tokens leave a choice of affinity >= 0; of all tokens "
        + ", ".join(f"{share:.2%}" for share in shares)
        + " leave, all affinities negative in "
        + ", ".join(f"{share:.2%}" for share in negatives),
        figures={
            "contrast": list(CLOSE_CONTRASTS),
            "left_though_not_negative": left,
            "left": shares,
            "negative": negatives,
            "outside_interval": outside,
        },
        verdict="proved; only tokens with negative affinities leave",
        doubt=f"{left} tokens left a choice that they should repeat, or {outside} shares lie "
        "outside their interval",
        basis="proof",
        holds_as_printed=None,
        note="M_k* multiplies the affinity of k* by more than the others, whether k* is right or "
        "wrong. The variant `distance` obeys the same with a_k - |e_k|^2 / 2 in place of a_k: it "
        "does not mend choices here either.",
    )


def tight_on(clusters: GaussianClusters = CLUSTERS) -> dict[str, Tensor]:
    """Return deviations (C, D) of clusters that are tight on their own or on other blocks."""
    own_CD = clusters.tight
    blocks = {"own block": own_CD, "next block": own_CD.roll(1, 0), "other blocks": ~own_CD}
    return {
        name: torch.where(tight_CD, 1 / clusters.contrast, 1.0).double()
        for name, tight_CD in blocks.items()
    }


def _scope_rates(seed: int, tokens: int) -> tuple[dict[str, BlockRates], int]:
    """Return the exact rates for each of `tight_on`, and how many measured ones disagree."""
    generator = torch.Generator().manual_seed(seed)
    every = tight_on()
    z = family_z(3 * len(every))
    rates, outside = {}, 0
    for name, std_CD in every.items():
        rates[name] = exact(CLUSTERS, std_CD, mended=True)
        x_TD, cluster_T = sample(CLUSTERS, std_CD, generator, tokens)
        plain_T = (x_TD @ CLUSTERS.means.T).argmax(-1)
        choice_T = adaptive_choice(x_TD, CLUSTERS.means, library_scale(std_CD), plain_T)
        wrong_T = plain_T != cluster_T
        for of_T, bad_T, expected in (
            (wrong_T, choice_T == plain_T, rates[name].repeated_wrong),
            (~wrong_T, choice_T == plain_T, rates[name].repeated_right),
            (torch.ones_like(wrong_T), choice_T != cluster_T, rates[name].adaptive_wrong),
        ):
            outside += not inside(int((of_T & bad_T).sum()), int(of_T.sum()), expected, z)
    return rates, outside


def check_confirmation_scope(seed: int = 0, tokens: int = TOKENS) -> Check:
    """Check the same means with clusters that are tight on other features."""
    rates, outside = _scope_rates(seed, tokens)
    nearly_all = rates["own block"].repeated_wrong > 1 - 1e-3
    ends = all(rates[name].repeated_wrong < 0.6 for name in ("next block", "other blocks"))
    mends = rates["next block"].adaptive_wrong < rates["next block"].plain_wrong
    harms = rates["other blocks"].adaptive_wrong > 3 * rates["other blocks"].plain_wrong
    confirmed = outside == 0 and nearly_all and ends and mends and harms
    return conclude(
        confirmed,
        name="Eqn. 8, tight on other blocks",
        statement=STATEMENT,
        setting=f"contrast {CLUSTERS.contrast:g}, separation 3, the true scale, {tokens} tokens; "
        "tight on " + ", ".join(rates),
        measured="wrong choices repeated: "
        + ", ".join(f"{row.repeated_wrong:.1%}" for row in rates.values())
        + "; wrong under AC (plain): "
        + ", ".join(f"{row.adaptive_wrong:.3f} ({row.plain_wrong:.3f})" for row in rates.values()),
        figures=_scope_figures(rates) | {"outside_interval": outside},
        verdict="ends where another expert reads the tight features",
        doubt=f"{outside} shares lie outside their interval, or choices are repeated there too",
        basis="counterexample",
        holds_as_printed=None,
        note="M_j multiplies the affinity of whichever expert reads the tight features of j. If "
        "this expert is not j, tokens leave wrong choices: a gain if the right ones stay (next "
        "block), a loss if not (other blocks).",
    )


def _scope_figures(rates: dict[str, BlockRates]) -> dict[str, Figure]:
    return {
        f"{name.replace(' ', '_')}_{field}": getattr(row, field)
        for name, row in rates.items()
        for field in ("plain_wrong", "adaptive_wrong", "repeated_wrong", "repeated_right")
    }
