"""Configs of the routers that wrap no other router, and of the auxiliary losses of all routers."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from acmoe.config.annotations import check_types
from acmoe.errors import check, check_choice, check_not_negative, check_positive

Gate = Literal["auto", "selected", "all"]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of a router's auxiliary losses; a weight of 0 switches a loss off."""

    balance: float = 0.01  # E * sum of f_e * P_e, which is 1 at perfect balance
    importance_load: float = 0.0  # Swin-MoE's (L_importance + L_load) / 2; needs router noise
    z: float = 0.0  # mean squared logsumexp of the affinities
    # Compute the load loss as Tutel does: probabilities against a threshold on logits.
    tutel: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("balance", "importance_load", "z"):
            check_not_negative(getattr(self, name), name)


@dataclass(frozen=True, kw_only=True)
class SMoEConfig:
    """The plain top-k router: the affinity of a token x and expert k is x . e_k.

    The gate of the chosen experts is a softmax over their k affinities (Eqn. 2). At k = 1 that
    would be the constant 1, through which the router could not learn, so there the gate is the
    chosen expert's share of a softmax over all E experts; `gate` sets either form for any k.
    Where affinities are equal, the expert with the lowest index comes first.
    """

    name: ClassVar[str] = "smoe"
    bias: bool = False  # add a learned number for each expert to its affinity
    gate: Gate = "auto"  # softmax over the selected k, or over all E; auto: all if k = 1
    noise: float = 0.0  # training noise on the affinities, std in units of 1/E
    normalize_embeddings: bool = False  # unit-length e_k, a control for the published AC gates
    # Length of the stored embeddings behind the unit-length e_k, restored after every optimizer
    # step. A step then turns e_k by an angle that does not shrink as training goes on. The
    # published LM gate has 1.5; None: the length is free.
    embedding_length: float | None = None
    init: Literal["uniform", "orthogonal"] = "uniform"  # +-1/sqrt(d), or orthogonal, gain 0.32
    balance_temperature: float = 1.0  # softmax temperature of the balance loss; published LM: 0.3
    bias_balancing: float = 0.0  # loss-free balancing: step size of each expert's selection bias

    def __post_init__(self) -> None:
        check_types(self)
        check_choice(self.gate, ("auto", "selected", "all"), "gate")
        check_choice(self.init, ("uniform", "orthogonal"), "init")
        check_not_negative(self.noise, "noise")
        check_positive(self.balance_temperature, "balance_temperature")
        check_not_negative(self.bias_balancing, "bias_balancing")
        if self.embedding_length is not None:
            check_positive(self.embedding_length, "embedding_length")
            check(
                self.normalize_embeddings,
                f"embedding_length={self.embedding_length} is the length behind unit-length "
                "embeddings; set normalize_embeddings=True",
            )


@dataclass(frozen=True, kw_only=True)
class MetricConfig(SMoEConfig):
    """Top-k routing where each expert's affinity is lowered by the token's distance from it.

    The distance is taken in the expert's own metric: its running mean and variance. An optimizer
    step in which an expert is the first choice of a single token does not change them.
    """

    name: ClassVar[str] = "metric"
    strength: float = 1.0  # initial value of the distance's learned weight; 0: the plain router
    momentum: float = 0.95  # factor on the weight of past tokens, at each optimizer step
    # Mean and variance over all tokens enter each expert's statistics as this many extra tokens.
    prior_tokens: float = 16.0
    floor: float = 1e-3  # least variance, as a fraction of the variance over all tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.strength, "strength")
        check(0 <= self.momentum < 1, f"momentum={self.momentum}; it must lie in [0, 1)")
        check_positive(self.prior_tokens, "prior_tokens")
        check_positive(self.floor, "floor")


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """XMoE: affinity = cos(R x, e_k) / temperature, where R projects to a low dimension."""

    name: ClassVar[str] = "cosine"
    proj_dim: int | None = None  # None: E / 2, as in XMoE
    temperature: float = 0.3  # initial value; it is learned
    gate: Gate = "auto"  # as in SMoEConfig
    legacy: bool = False  # the published baseline: R x is not normalised, no temperature

    def __post_init__(self) -> None:
        check_types(self)
        check_choice(self.gate, ("auto", "selected", "all"), "gate")
        check_positive(self.temperature, "temperature")
        check(
            self.proj_dim is None or self.proj_dim >= 1,
            f"proj_dim={self.proj_dim}; it must be at least 1, or None for E / 2",
        )


@dataclass(frozen=True, kw_only=True)
class StableConfig:
    """StableMoE, in two stages.

    Stage one learns the routing and distils it into a light router that reads token ids alone;
    stage two freezes that light router and routes with it.
    """

    name: ClassVar[str] = "stable"
    vocab_size: int | None = None  # the light router embeds token ids; required unless legacy
    light_dim: int = 50  # features of the distilled router, which reads token ids
    distill: float = 0.3  # weight of the light router's cross-entropy
    balance: float = 0.3  # weight of StableMoE's own balance loss
    legacy: bool = False  # the published baseline: one stage, unit-length embeddings

    def __post_init__(self) -> None:
        check_types(self)
        check(self.light_dim >= 1, f"light_dim={self.light_dim}; it must be at least 1")
        check_not_negative(self.distill, "distill")
        check_not_negative(self.balance, "balance")
        check(
            self.legacy or self.vocab_size is None or self.vocab_size >= 1,
            f"vocab_size={self.vocab_size}; it must be at least 1",
        )


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig:
    """Select every expert whose softmax affinity exceeds a threshold p, at least one ("top-p")."""

    name: ClassVar[str] = "threshold"
    threshold: float = 0.05  # least probability of a chosen expert
    learnable: bool = False  # learn the threshold
    surrogate: Literal["sigmoid", "straight-through"] = "sigmoid"  # the threshold's gradient
    temperature: float = 0.01  # width of the sigmoid surrogate, in units of probability
    bias: bool = False  # as in SMoEConfig

    def __post_init__(self) -> None:
        check_types(self)
        check(
            0 < self.threshold < 1,
            f"threshold={self.threshold}; a softmax affinity needs one between 0 and 1",
        )
        check_choice(self.surrogate, ("sigmoid", "straight-through"), "surrogate")
        check_positive(self.temperature, "temperature")


@dataclass(frozen=True, kw_only=True)
class HashConfig:
    """Each token id is sent to fixed, randomly drawn experts; nothing is learned."""

    name: ClassVar[str] = "hash"
    seed: int = 0  # seed of the draw of experts

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceConfig:
    """Each expert selects its top tokens of the whole batch. Not causal."""

    name: ClassVar[str] = "expert-choice"
    capacity_factor: float = 1.0  # tokens per expert = factor * k * T / E
    bias: bool = False  # as in SMoEConfig

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self.capacity_factor, "capacity_factor")


@dataclass(frozen=True, kw_only=True)
class SoftConfig:
    """SoftMoE: every slot is a convex combination of the tokens of a sequence. Not causal."""

    name: ClassVar[str] = "soft"
    slots_per_expert: int = 1  # slots that each expert computes, of each sequence

    def __post_init__(self) -> None:
        check_types(self)
        check(
            self.slots_per_expert >= 1,
            f"slots_per_expert={self.slots_per_expert}; it must be at least 1",
        )


@dataclass(frozen=True, kw_only=True)
class CustomConfig:
    """The base of router configs that a package outside acmoe defines.

    A subclass is a frozen dataclass with a class variable `name`. It is known everywhere a config
    of acmoe is: by its name, as the base of `AdaptiveConfig`, in saved models and on the command
    line of a process that has imported it.
    """

    name: ClassVar[str]


BaseConfig = (
    SMoEConfig
    | CosineConfig
    | StableConfig
    | ThresholdConfig
    | HashConfig
    | ExpertChoiceConfig
    | SoftConfig
    | MetricConfig
    | CustomConfig
)
