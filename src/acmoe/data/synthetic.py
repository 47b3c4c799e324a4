"""Synthetic Gaussian clusters with small variance on different features, to test the theory.

All quantities that routers are compared with are known in closed form: the means, the dispersions,
and the features that identify each cluster.

T tokens, D features, C clusters.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from acmoe.errors import check


@dataclass(frozen=True, kw_only=True)
class GaussianClusters:
    """A mixture of C equally likely Gaussians with diagonal covariances.

    Cluster c is tight (standard deviation 1 / `contrast`) on its own block of `tight_features`
    features and loose (standard deviation 1, the unit of every length here) on the others. Its mean
    is nonzero only in that block, so clusters are separated along the features on which they are
    tight, as the paper assumes. Any two means are `separation` apart. `noise` is the standard
    deviation of isotropic noise added to every token.
    """

    num_clusters: int = 4
    dim: int = 16
    tight_features: int = 4
    contrast: float = 8.0  # loose / tight standard deviation; with 1 no feature is tight
    separation: float = 3.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        check(self.num_clusters >= 1, f"num_clusters={self.num_clusters}; use at least 1")
        check(self.tight_features >= 1, f"tight_features={self.tight_features}; use at least 1")
        needed = self.num_clusters * self.tight_features
        check(
            self.dim >= needed,
            f"dim={self.dim} cannot hold {self.num_clusters} blocks of {self.tight_features} tight "
            f"features; use dim of at least {needed}",
        )
        for name, least in (("contrast", 1.0), ("separation", 0.0), ("noise", 0.0)):
            value = getattr(self, name)
            check(
                math.isfinite(value) and value >= least,
                f"{name}={value}; use a finite number of at least {least:g}",
            )

    @property
    def tight(self) -> Tensor:
        """(C, D) bool: True for the features on which each cluster is tight."""
        block_D = torch.arange(self.dim) // self.tight_features
        return block_D == torch.arange(self.num_clusters)[:, None]

    @property
    def means(self) -> Tensor:
        """(C, D) float64 means: equal entries on the tight features, zero elsewhere."""
        # Means with disjoint supports are orthogonal, so each has norm separation / sqrt(2).
        height = self.separation / math.sqrt(2 * self.tight_features)
        return height * self.tight.double()

    @property
    def clean_stds(self) -> Tensor:
        """(C, D) float64 standard deviations without the noise."""
        return torch.where(self.tight, 1 / self.contrast, 1.0).double()

    @property
    def stds(self) -> Tensor:
        """(C, D) float64 standard deviations of the sampled tokens, with the noise."""
        return (self.clean_stds.square() + self.noise**2).sqrt()

    def sample(
        self, num_tokens: int, generator: torch.Generator, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens (T, D), and return them with their clusters (T,). Needs a CPU generator."""
        check(num_tokens >= 0, f"num_tokens={num_tokens}; use at least 0")
        cluster_T = torch.randint(self.num_clusters, (num_tokens,), generator=generator)
        shape = (num_tokens, self.dim)
        unit_TD = torch.randn(shape, generator=generator, dtype=torch.float64)
        x_TD = self.means[cluster_T] + self.stds[cluster_T] * unit_TD
        return x_TD.to(dtype), cluster_T
