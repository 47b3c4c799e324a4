"""Routers that choose experts by themselves, and the auxiliary losses of all routers."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from acmoe.errors import check, check_choice, check_not_negative, check_positive

Gate = Literal["auto", "selected", "all"]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the auxiliary losses a router adds; 0 leaves a loss out."""

    balance: float = 0.01  # E * sum of f_e * P_e: 1 at perfect balance
    importance_load: float = 0.0  # Swin-MoE's (L_importance + L_load) / 2; needs router noise
    z: float = 0.0  # mean squared logsumexp of the affinities
    tutel: bool = False  # load loss of probabilities against a logit threshold, as Tutel mixes them

    def __post_init__(self) -> None:
        for name in ("balance", "importance_load", "z"):
            check_not_negative(getattr(self, name), name)


@dataclass(frozen=True, kw_only=True)
class SMoEConfig:
    """The plain top-k router: affinity = x . e_k."""

    name: ClassVar[str] = "smoe"
    bias: bool = False
    gate: Gate = "auto"  # softmax over the selected k, or over all E; auto: all when k = 1
    noise: float = 0.0  # training noise on the affinities, std in units of 1/E
    normalize_embeddings: bool = False  # unit-length e_k: the control for published AC gates
    init: Literal["uniform", "orthogonal"] = "uniform"  # +-1/sqrt(d), or orthogonal of gain 0.32
    balance_temperature: float = 1.0  # of the softmax inside the balance loss; published LM: 0.3
    bias_balancing: float = 0.0  # loss-free balancing: step of each expert's selection bias

    def __post_init__(self) -> None:
        check_choice(self.gate, ("auto", "selected", "all"), "gate")
        check_choice(self.init, ("uniform", "orthogonal"), "init")
        check_not_negative(self.noise, "noise")
        check_positive(self.balance_temperature, "balance_temperature")
        check_not_negative(self.bias_balancing, "bias_balancing")


@dataclass(frozen=True, kw_only=True)
class MetricConfig(SMoEConfig):
    """Top-k, less the token's distance from each expert in that expert's own metric."""

    name: ClassVar[str] = "metric"
    strength: float = 1.0  # where the learned weight of the distance starts; 0: the plain router
    momentum: float = 0.95  # of each expert's mean and variance, per optimizer step
    prior_tokens: float = 16.0  # mean and variance of all tokens count as this many of the expert's
    floor: float = 1e-3  # least variance, as a share of that of all tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.strength, "strength")
        check(0 <= self.momentum < 1, f"momentum={self.momentum}; it must lie in [0, 1)")
        check_positive(self.prior_tokens, "prior_tokens")
        check_positive(self.floor, "floor")


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """XMoE: affinity = cos(R x, e_k) / temperature, in a low dimension."""

    name: ClassVar[str] = "cosine"
    proj_dim: int | None = None  # None: E / 2, as XMoE
    temperature: float = 0.3  # where the learnable temperature starts
    gate: Gate = "auto"
    legacy: bool = False  # the published baseline: R x not normalised, no temperature

    def __post_init__(self) -> None:
        check_choice(self.gate, ("auto", "selected", "all"), "gate")
        check_positive(self.temperature, "temperature")
        check(
            self.proj_dim is None or self.proj_dim >= 1,
            f"proj_dim={self.proj_dim}; it must be at least 1, or None for E / 2",
        )


@dataclass(frozen=True, kw_only=True)
class StableConfig:
    """StableMoE: stage one learns and distils the routing into token ids, stage two freezes it."""

    name: ClassVar[str] = "stable"
    vocab_size: int | None = None  # needed unless legacy: the light router embeds token ids
    light_dim: int = 50
    distill: float = 0.3  # weight of the light router's cross-entropy
    balance: float = 0.3  # weight of StableMoE's own balance loss
    legacy: bool = False  # the published baseline: one stage, unit-length embeddings

    def __post_init__(self) -> None:
        check(self.light_dim >= 1, f"light_dim={self.light_dim}; it must be at least 1")
        check_not_negative(self.distill, "distill")
        check_not_negative(self.balance, "balance")
        check(
            self.legacy or self.vocab_size is None or self.vocab_size >= 1,
            f"vocab_size={self.vocab_size}; it must be at least 1",
        )


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig:
    """Every expert whose softmax affinity exceeds p, and always the first choice ("top-p")."""

    name: ClassVar[str] = "threshold"
    threshold: float = 0.05
    learnable: bool = False
    surrogate: Literal["sigmoid", "straight-through"] = "sigmoid"  # the gradient of p
    temperature: float = 0.01  # width of the sigmoid surrogate, in units of probability
    bias: bool = False

    def __post_init__(self) -> None:
        check(
            0 < self.threshold < 1,
            f"threshold={self.threshold}; a softmax affinity needs one between 0 and 1",
        )
        check_choice(self.surrogate, ("sigmoid", "straight-through"), "surrogate")
        check_positive(self.temperature, "temperature")


@dataclass(frozen=True, kw_only=True)
class HashConfig:
    """A fixed random choice of experts for each token id; nothing is learned."""

    name: ClassVar[str] = "hash"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceConfig:
    """Each expert takes its best tokens of the whole batch. Not causal."""

    name: ClassVar[str] = "expert-choice"
    capacity_factor: float = 1.0  # tokens per expert = factor * k * T / E
    bias: bool = False

    def __post_init__(self) -> None:
        check_positive(self.capacity_factor, "capacity_factor")


@dataclass(frozen=True, kw_only=True)
class SoftConfig:
    """SoftMoE: every slot is a convex mixture of a sequence's tokens. Not causal."""

    name: ClassVar[str] = "soft"
    slots_per_expert: int = 1

    def __post_init__(self) -> None:
        check(
            self.slots_per_expert >= 1,
            f"slots_per_expert={self.slots_per_expert}; it must be at least 1",
        )


BaseConfig = (
    SMoEConfig
    | CosineConfig
    | StableConfig
    | ThresholdConfig
    | HashConfig
    | ExpertChoiceConfig
    | SoftConfig
    | MetricConfig
)
