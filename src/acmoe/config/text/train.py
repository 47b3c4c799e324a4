"""A whole experiment as data: the model, its corpus, the optimizer and what is written when."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from acmoe.config.overrides import override
from acmoe.config.routing import AdaptiveConfig, RandomConfig, RouterConfig, StableConfig
from acmoe.config.text.language import LanguageConfig, base_router, language_router
from acmoe.config.updates import check_count, check_updates
from acmoe.errors import check, check_choice, check_positive

Precision = Literal["fp32", "bf16"]

UPDATES_PER_EPOCH = 1000  # the paper counts in these "epochs", which are no passes over the data


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which prepared corpus a run reads."""

    name: str = "stdlib"  # a data set of the registry
    folder: str | None = None  # None: data/NAME, where `acmoe data prepare NAME` leaves it
    limit: int | None = None  # stdlib: bytes of text used; None: all

    def __post_init__(self) -> None:
        check(
            self.limit is None or self.name == "stdlib",
            f"data.limit={self.limit} cuts the text when it is prepared; {self.name} is prepared "
            "beforehand: give the limit to `acmoe data prepare`",
        )

    @property
    def path(self) -> Path:
        return Path("data") / self.name if self.folder is None else Path(self.folder)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. Equal configs on one machine's CPU give equal weights, bit by bit."""

    model: LanguageConfig
    data: DataConfig = field(default_factory=DataConfig)
    steps: int  # optimizer updates
    batch: int  # streams read side by side, each in blocks of model.block tokens
    split: int = 1  # micro-batches of streams whose gradients make one update
    lr: float
    warmup: int = 0  # updates over which lr rises from 0
    schedule: Literal["constant", "cosine"] = "constant"  # after the warmup
    min_lr: float = 0.0  # where cosine ends, at the last step
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0  # decoupled, on matrices only
    # The routers' matrices alone: plain SGD lacks Adam's division by each feature's gradient size,
    # which undoes any stretching that all clusters share.
    router_optimizer: Literal["adam", "sgd"] = "adam"
    router_lr: float | None = None  # of that SGD; rises and falls with lr. None: lr
    clip: float | None = None  # greatest norm of the gradient; None: not clipped, as in the paper
    precision: Precision = "fp32"  # bf16: autocast; weights and optimizer stay float32
    seed: int = 0
    log_every: int = 10  # steps between lines of metrics.jsonl
    eval_every: int = 1000
    eval_batch: int = 8  # rows of the validation split read side by side
    eval_tokens: int | None = None  # validate on its first tokens only; None: on all
    checkpoint_every: int = 1000
    keep: int = 1  # latest checkpoints kept, beside the best one
    compile: bool = False  # torch.compile each block
    graph: bool = False  # replay updates as CUDA graphs: small models wait for launches otherwise
    device: str = "auto"  # cuda where there is one

    def __post_init__(self) -> None:
        check_updates(self, rows="streams")
        check_count(self.steps, "steps")
        check_choice(self.router_optimizer, ("adam", "sgd"), "router_optimizer")
        if self.router_lr is not None:
            check_positive(self.router_lr, "router_lr")
            check(
                self.router_optimizer == "sgd",
                f"router_lr={self.router_lr} is the rate of router_optimizer='sgd'; Adam gives "
                "routers the same as all: leave it out",
            )
        check(
            self.eval_tokens is None or self.eval_tokens > self.eval_batch,
            f"eval_tokens={self.eval_tokens} leaves no prediction for each of "
            f"eval_batch={self.eval_batch} rows; raise it",
        )

    @property
    def router_sgd(self) -> float | None:
        """Learning rate of plain SGD on the routers' matrices; None where Adam trains them."""
        if self.router_optimizer == "adam":
            return None
        return self.lr if self.router_lr is None else self.router_lr

    @property
    def epochs(self) -> float:
        """The length of the run as the paper states it."""
        return self.steps / UPDATES_PER_EPOCH

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.block


def override_run(config: RunConfig, pairs: Sequence[str]) -> RunConfig:
    """A run with `key=value` overrides; see `acmoe.config.overrides`.

    A router given by its name, or the base of one, is what the model's family means by that name,
    as in `create_model`.
    """
    changed = override(
        config, pairs, named=lambda owner, name, value: language_router(value, config.model)
    )
    model = changed.model
    return replace(changed, model=replace(model, router=_same_vocabulary(model.router, model)))


def _same_vocabulary(router: RouterConfig, model: LanguageConfig) -> RouterConfig:
    """StableMoE's light router embeds the model's token ids, however many those became."""
    base = base_router(router)
    if not isinstance(base, StableConfig) or base.legacy or base.vocab_size == model.vocab_size:
        return router
    base = replace(base, vocab_size=model.vocab_size)
    return replace(router, base=base) if isinstance(router, AdaptiveConfig | RandomConfig) else base
