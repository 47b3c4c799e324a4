"""The task of the synthetic study: Gaussian clusters, each with its own teacher function.

A token of cluster c has the target teacher_c(token). The teachers are independent, so an expert
that serves two clusters has a higher loss, and a router must find the clusters to learn the task.

T tokens, D features, C clusters, O outputs, H hidden units of a teacher.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, RandomConfig, RouterConfig, SMoEConfig
from acmoe.data.seeding import derive_seed
from acmoe.data.synthetic import GaussianClusters
from acmoe.errors import check, check_choice, check_not_negative, check_positive

Oracle = Literal["none", "scale", "cluster"]
Between = Literal["identity", "permutation", "rotation"]
TEACHER_HIDDEN = 16
CLUSTERS = GaussianClusters(num_clusters=4, dim=16, tight_features=4, contrast=8.0, separation=3.0)


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """One run of the synthetic study. The unit of length is the larger standard deviation."""

    seed: int = 0
    router: RouterConfig = SMoEConfig()
    # An adaptive router is given nothing; the true inverse dispersions of the most frequent
    # true cluster among the tokens it groups together; or those of each token's true cluster. The
    # last reveals the solution, and so is an upper bound for every scale.
    oracle: Oracle = "none"
    layers: int = 2
    clusters: GaussianClusters = CLUSTERS
    feature_range: float = 1.0  # largest over smallest unit of a feature, equal in all clusters
    between: Between = "identity"  # fixed map from the first layer's features to the second's
    norm: bool = False  # LayerNorm in front of every MoE layer
    teacher: Literal["linear", "mlp"] = "linear"
    outputs: int = 4
    hidden: int = 16  # hidden units of an expert
    top_k: int = 1
    balance: float = 0.01
    steps: int = 400
    batch: int = 256  # tokens
    lr: float = 5e-3
    router_optimizer: Literal["adam", "sgd"] = "adam"  # Adam trains everything else
    router_lr: float = 5e-3
    eval_every: int = 20
    held_out: int = 2048  # tokens
    contamination: tuple[float, ...] = (0.25, 0.5, 1.0)  # std of noise added to held-out tokens
    threshold: float = 0.8  # adjusted Rand index from which clusters count as found

    def __post_init__(self) -> None:
        check_choice(self.oracle, ("none", "scale", "cluster"), "oracle")
        check_choice(self.between, ("identity", "permutation", "rotation"), "between")
        check_choice(self.teacher, ("linear", "mlp"), "teacher")
        check_choice(self.router_optimizer, ("adam", "sgd"), "router_optimizer")
        check(self.layers in (1, 2), f"layers={self.layers}; use 1 or 2")
        for name in ("outputs", "hidden", "top_k", "steps", "batch", "eval_every", "held_out"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)}; use at least 1")
        check(
            math.isfinite(self.feature_range) and self.feature_range >= 1,
            f"feature_range={self.feature_range}; use a finite number of at least 1",
        )
        check_not_negative(self.balance, "balance")
        check_positive(self.lr, "lr")
        check_positive(self.router_lr, "router_lr")
        for noise in self.contamination:
            check_positive(noise, "contamination")
        check(0 < self.threshold <= 1, f"threshold={self.threshold}; use one in (0, 1]")
        self._check_together()

    def _check_together(self) -> None:
        check(
            self.layers == 2 or self.between == "identity",
            f"between={self.between!r} needs a second layer; use layers=2",
        )
        adaptive = isinstance(self.router, AdaptiveConfig)
        if self.oracle != "none":
            check(
                isinstance(self.router, AdaptiveConfig)
                and self.router.reads == "previous"
                and self.router.mix == 1,
                f"oracle={self.oracle!r} hands its scale on as a previous layer would; use an "
                "AdaptiveConfig of statistics_of='previous' and mix=1",
            )
        check(
            not (adaptive and self.layers == 1 and self.oracle == "none")
            or (isinstance(self.router, AdaptiveConfig) and self.router.reads == "current"),
            "layers=1 has no previous layer; use statistics_of='current', which reads the layer's "
            "own tokens grouped by a plain first pass of its router",
        )
        if isinstance(self.router, AdaptiveConfig):
            check(
                set(self.router.modes) <= {"batch", "running"},
                f"statistics={self.router.statistics!r} needs sequences, and these tokens are "
                "in none; use batch or running",
            )

    @property
    def rescales(self) -> bool:
        """Return True if the router rescales its tokens."""
        return isinstance(self.router, AdaptiveConfig | RandomConfig)


class Batch(NamedTuple):
    """Tokens, their targets, and the cluster each token was drawn from."""

    x: Tensor  # (T, D)
    target: Tensor  # (T, O)
    cluster: Tensor  # (T,)


class SyntheticTask:
    """The fixed part of a task: feature units, the map between layers and the teachers."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        clusters = config.clusters
        draw = torch.Generator().manual_seed(derive_seed(config.seed, "synthetic", "task"))
        place_D = torch.linspace(-0.5, 0.5, clusters.dim, dtype=torch.float64)
        place_D = place_D[torch.randperm(clusters.dim, generator=draw)]
        self.unit_D = config.feature_range**place_D
        self.between_DD = _between(config.between, clusters.dim, draw)
        first = config.outputs if config.teacher == "linear" else TEACHER_HIDDEN
        shape = (clusters.num_clusters, first, clusters.dim)
        self.first_COD = torch.randn(shape, generator=draw).double() / math.sqrt(clusters.dim)
        shape = (clusters.num_clusters, config.outputs, first)
        self.second_COH = torch.randn(shape, generator=draw).double() / math.sqrt(first)

    def sample(
        self, num_tokens: int, generator: torch.Generator, *, contamination: float = 0.0
    ) -> Batch:
        """Draw tokens with targets; `contamination` adds noise to tokens and not to targets."""
        plain_TD, cluster_T = self.config.clusters.sample(
            num_tokens, generator, dtype=torch.float64
        )
        target_TO = self.teach(plain_TD, cluster_T)
        if contamination:
            noise_TD = torch.randn(plain_TD.shape, generator=generator, dtype=torch.float64)
            plain_TD = plain_TD + contamination * noise_TD
        return Batch((plain_TD * self.unit_D).float(), target_TO.float(), cluster_T)

    def teach(self, plain_TD: Tensor, cluster_T: Tensor) -> Tensor:
        """Return (T, O) targets, each by the teacher of the token's cluster."""
        out_TO = plain_TD.new_empty(len(plain_TD), self.config.outputs)
        for c in range(self.config.clusters.num_clusters):
            own_T = cluster_T == c
            hidden_TH = plain_TD[own_T] @ self.first_COD[c].mT
            if self.config.teacher == "mlp":
                hidden_TH = torch.tanh(2 * hidden_TH) @ self.second_COH[c].mT
            out_TO[own_T] = hidden_TH
        return out_TO

    def stds(self, depth: int) -> Tensor:
        """Return (C, D) true standard deviations in the features of the layer at that depth."""
        std_CD = self.config.clusters.stds * self.unit_D
        if depth == 0:
            return std_CD
        # The variances are the diagonal of B diag(variance) B'.
        return (std_CD.square() @ self.between_DD.square().mT).sqrt()


def _between(kind: Between, dim: int, draw: torch.Generator) -> Tensor:
    """Return a (D, D) orthogonal map: the identity, a permutation or a random rotation."""
    order_D = torch.randperm(dim, generator=draw)
    mixed_DD = torch.randn(dim, dim, generator=draw, dtype=torch.float64)
    identity_DD = torch.eye(dim, dtype=torch.float64)
    if kind == "permutation":
        return identity_DD[order_D]
    return torch.linalg.qr(mixed_DD).Q if kind == "rotation" else identity_DD
