"""Measure how tight clusters are and how far they lie apart.

N tokens, D features, C clusters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acmoe.errors import UserError

SILHOUETTE_TOKENS = 2000  # all distances between them are held at once


@dataclass(frozen=True, kw_only=True)
class Separation:
    """Separation of labelled tokens; None if fewer than two labels have at least two tokens."""

    within_share: float | None  # scatter within clusters over total scatter; 1: equal means
    silhouette: float | None  # -1 to 1; positive if tokens are nearest to their own cluster


def measure_separation(
    x_ND: Tensor, label_N: Tensor, *, seed: int = 0, silhouettes: bool = True
) -> Separation:
    """Measure the clusters with at least two tokens. Tokens with label -1 are left out."""
    x_ND, label_N = _without_singletons(x_ND, label_N)
    if _labels(label_N) < 2:
        return Separation(within_share=None, silhouette=None)
    return Separation(
        within_share=within_share(x_ND, label_N),
        silhouette=silhouette(x_ND, label_N, seed=seed) if silhouettes else None,
    )


def within_share(x_ND: Tensor, label_N: Tensor) -> float:
    """Return the scatter about the clusters' means over the scatter about the mean of all."""
    x_ND = x_ND.double()
    count_C = label_N.bincount()
    total_CD = x_ND.new_zeros(len(count_C), x_ND.shape[1]).index_add(0, label_N, x_ND)
    mean_CD = total_CD / count_C.clamp(min=1)[:, None]
    whole = (x_ND - x_ND.mean(0)).square().sum()
    if whole == 0:
        return 1.0  # all tokens are the same
    return float((x_ND - mean_CD[label_N]).square().sum() / whole)


def silhouette(x_ND: Tensor, label_N: Tensor, *, seed: int = 0) -> float | None:
    """Return the mean Euclidean silhouette of at most SILHOUETTE_TOKENS randomly drawn tokens."""
    try:
        from sklearn.metrics import silhouette_score
    except ImportError as error:
        raise UserError("silhouettes need the plots extra: pip install 'acmoe[plots]'") from error
    if len(label_N) > SILHOUETTE_TOKENS:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(label_N), generator=generator)[:SILHOUETTE_TOKENS]
        x_ND, label_N = _without_singletons(x_ND[drawn], label_N[drawn])
    if _labels(label_N) < 2:
        return None
    return float(silhouette_score(x_ND.double().numpy(), label_N.numpy()))


def _without_singletons(x_ND: Tensor, label_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labelled tokens that share their label with another token."""
    labelled = label_N >= 0
    x_ND, label_N = x_ND[labelled], label_N[labelled]
    shared_N = label_N.bincount()[label_N] >= 2
    return x_ND[shared_N], label_N[shared_N]


def _labels(label_N: Tensor) -> int:
    return int((label_N.bincount() > 0).sum())
