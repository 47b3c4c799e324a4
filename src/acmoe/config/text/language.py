"""The decoders of the paper and their laptop-sized siblings, as data."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from acmoe.config.routing import (
    AdaptiveConfig,
    ExpertChoiceConfig,
    LossConfig,
    RandomConfig,
    RouterConfig,
    SMoEConfig,
    SoftConfig,
    StableConfig,
    ThresholdConfig,
    check_choice,
    check_not_negative,
    router_config,
)
from acmoe.errors import check

Layer = Literal["moe", "ffn"]


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """A decoder: `repeats` times the `layers`, each behind its own self-attention."""

    vocab_size: int
    dim: int
    heads: int
    hidden: int  # inner size of an expert and of a dense layer
    repeats: int
    layers: tuple[Layer, ...] = ("moe",)  # Switch; GLaM is ("moe", "ffn")
    span: int  # tokens each query can see
    block: int  # tokens of one training segment
    dropout: float = 0.1  # on attention probabilities, hidden units and MoE outputs
    num_experts: int = 16
    top_k: int = 2
    router: RouterConfig = SMoEConfig(bias=True)
    # Which MoE layers keep an adaptive router: full | skip-1 | skip-2 | alternating | back-half, or
    # their depths, counted from 0.
    placement: str | tuple[int, ...] = "full"
    balance: float = 0.01  # weight of the balance loss, summed over MoE layers
    z: float = 0.0  # weight of the router z-loss
    norm: Literal["post", "pre"] = "post"  # the paper's block with its doubled residual, or GPT-2's
    position: Literal["relative", "rope"] = "relative"  # the paper's learned table, or rotary
    # Bound of the experts' first weights: 1/sqrt(d), or the published 1/d, 11 to 19 times smaller.
    expert_init: Literal["fan_in", "published"] = "fan_in"
    # What a stream's first tokens see before them: nothing, or the published code's slots of zeros,
    # which take part in the softmax.
    empty_memory: Literal["masked", "zeros"] = "masked"

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "dim", "heads", "hidden", "repeats", "span", "block"),
            *("num_experts", "top_k"),
        ):
            value = getattr(self, name)
            check(
                isinstance(value, int) and value >= 1,
                f"{name}={value!r}; it must be an integer of at least 1",
            )
        check(
            len(self.layers) > 0 and all(layer in ("moe", "ffn") for layer in self.layers),
            f"layers={self.layers!r}; give a tuple of 'moe' and 'ffn', such as ('moe', 'ffn')",
        )
        check(
            isinstance(self.router, RouterConfig),
            f"router={self.router!r} is no router config; pass acmoe.SMoEConfig(...) or another, "
            "or its name to acmoe.create_model",
        )
        check(0 <= self.dropout < 1, f"dropout={self.dropout}; it must lie in [0, 1)")
        check_not_negative(self.balance, "balance")
        check_not_negative(self.z, "z")
        check_choice(self.norm, ("post", "pre"), "norm")
        check_choice(self.position, ("relative", "rope"), "position")
        check_choice(self.expert_init, ("fan_in", "published"), "expert_init")
        check_choice(self.empty_memory, ("masked", "zeros"), "empty_memory")
        self._check_together()

    def _check_together(self) -> None:
        check(
            self.dim % self.heads == 0,
            f"dim={self.dim} does not split over heads={self.heads}; make it a multiple",
        )
        check(
            self.position == "relative" or self.head_dim % 2 == 0,
            f"position='rope' turns pairs of features, and dim / heads = {self.head_dim} is odd; "
            "change heads",
        )
        check(
            not isinstance(base_router(self.router), SoftConfig),
            "router='soft' mixes a text's later tokens into its earlier ones; a language model "
            "needs another, such as 'smoe' or 'adaptive'",
        )
        check(
            self.top_k <= self.num_experts,
            f"top_k={self.top_k} exceeds num_experts={self.num_experts}; lower top_k",
        )
        check(
            self.empty_memory == "masked" or (self.norm, self.position) == ("post", "relative"),
            f"empty_memory='zeros' is the published model's and needs norm='post' and "
            f"position='relative', not {self.norm!r} and {self.position!r}",
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def sequence(self) -> tuple[Layer, ...]:
        """The layer behind each self-attention, first to last."""
        return self.layers * self.repeats

    @property
    def num_moe_layers(self) -> int:
        return self.sequence.count("moe")

    @property
    def losses(self) -> LossConfig:
        return LossConfig(balance=self.balance, z=self.z)


def base_router(router: RouterConfig) -> RouterConfig:
    """The router a rescaling one wraps, or the router itself."""
    return router.base if isinstance(router, AdaptiveConfig | RandomConfig) else router


def language_router(router: str | RouterConfig, config: LanguageConfig) -> RouterConfig:
    """What a router asked for by name or config means in a language model.

    The paper's linear gates have a bias here, so a name stands for a gate with one, and a rescaling
    router whose base was left at its default wraps such a gate: "smoe" and any adaptive router then
    differ in the scale alone. StableMoE learns what its vocabulary is.
    """
    found = router_config(router)
    if isinstance(router, str) and isinstance(
        found, SMoEConfig | ThresholdConfig | ExpertChoiceConfig
    ):
        return replace(found, bias=True)
    if isinstance(found, AdaptiveConfig | RandomConfig) and found.base == SMoEConfig():
        return replace(found, base=SMoEConfig(bias=True))
    base = base_router(found)
    if isinstance(base, StableConfig) and base.vocab_size is None and not base.legacy:
        base = replace(base, vocab_size=config.vocab_size)
        return (
            replace(found, base=base) if isinstance(found, AdaptiveConfig | RandomConfig) else base
        )
    return found


@dataclass(frozen=True, kw_only=True)
class LanguageModelCard:
    """A named decoder: what it is, and what the paper reports of it."""

    config: LanguageConfig
    description: str
    metric: str | None = None  # what `reported` measures; None: not a model of the paper
    reported: tuple[tuple[str, float], ...] = ()  # (router, figure)


def _paper(**fields: Any) -> LanguageConfig:
    return LanguageConfig(**{"vocab_size": 267_735, "heads": 8, "block": 512, **fields})


def _nano(**fields: Any) -> LanguageConfig:
    """Bytes, 8 experts, small enough that a laptop's CPU trains it in minutes."""
    return LanguageConfig(
        **{
            **{"vocab_size": 256, "dim": 64, "heads": 4, "hidden": 64, "span": 128, "block": 128},
            **{"dropout": 0.0, "num_experts": 8},
            **fields,
        }
    )


_WIKITEXT = "test perplexity, WikiText-103"
_ENWIK8 = "test bits per byte, EnWik-8"

LANGUAGE_MODELS: dict[str, LanguageModelCard] = {
    "switch-small": LanguageModelCard(
        # Dropout 0.7 stands in the published scripts; the paper does not print it.
        config=_paper(dim=128, hidden=128, repeats=3, span=256, block=256, dropout=0.7),
        description="Switch, 3 MoE layers, 267,735 words (WikiText-103)",
        metric=_WIKITEXT,
        reported=(("smoe", 87.94), ("cosine", 87.21), ("adaptive", 85.07)),
    ),
    "switch-medium": LanguageModelCard(
        # The paper's 34.42 is this placement's; "full" gave 34.88.
        config=_paper(dim=352, hidden=352, repeats=6, span=1024, placement="skip-1"),
        description="Switch, 6 MoE layers, 267,735 words (WikiText-103)",
        metric=_WIKITEXT,
        reported=(("smoe", 35.48), ("cosine", 35.88), ("stable", 35.33), ("adaptive", 34.42)),
    ),
    "switch-enwik8": LanguageModelCard(
        config=_paper(vocab_size=205, dim=352, hidden=352, repeats=8, span=2048),
        description="Switch, 8 MoE layers, 205 bytes (EnWik-8)",
        metric=_ENWIK8,
        reported=(("smoe", 1.153), ("adaptive", 1.137)),
    ),
    "glam-small": LanguageModelCard(
        # 3 + 3 as the paper's table says. Its 79M fit 2 + 2 layers, a slip of the code it built on.
        config=_paper(dim=144, hidden=144, repeats=3, layers=("moe", "ffn"), span=2048),
        description="GLaM, 3 MoE and 3 dense layers, 267,735 words (WikiText-103)",
        metric=_WIKITEXT,
        reported=(("smoe", 58.27), ("cosine", 54.80), ("adaptive", 54.55)),
    ),
    "glam-medium": LanguageModelCard(
        config=_paper(dim=352, hidden=352, repeats=6, layers=("moe", "ffn"), span=2048),
        description="GLaM, 6 MoE and 6 dense layers, 267,735 words (WikiText-103)",
        metric=_WIKITEXT,
        reported=(("smoe", 38.27), ("cosine", 38.10), ("stable", 38.04), ("adaptive", 36.26)),
    ),
    "switch-nano": LanguageModelCard(
        config=_nano(repeats=4),
        description="Switch, 4 MoE layers of 8 experts, 256 bytes, for a CPU",
    ),
    "glam-nano": LanguageModelCard(
        config=_nano(repeats=3, layers=("moe", "ffn")),
        description="GLaM, 3 MoE and 3 dense layers, 8 experts, 256 bytes, for a CPU",
    ),
}
