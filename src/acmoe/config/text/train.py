"""Config of a training run of a language model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from acmoe.config.overrides import override
from acmoe.config.parallel import ParallelConfig, check_parallel, check_pipeline
from acmoe.config.text.language import LanguageConfig, language_router, with_vocabulary
from acmoe.config.updates import Precision, check_count, check_updates
from acmoe.errors import check, check_choice, check_positive

UPDATES_PER_EPOCH = 1000  # the paper's "epoch" is 1000 updates, not a pass over the data


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prepared corpus that a run reads."""

    name: str = "stdlib"  # a data set of the registry
    folder: str | None = None  # None: data/NAME, where `acmoe data prepare NAME` writes it
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
    """One training run. On the CPU of one machine, equal configs give bitwise equal weights."""

    model: LanguageConfig  # the model
    data: DataConfig = field(default_factory=DataConfig)  # the text
    steps: int  # optimizer updates
    batch: int  # streams read in parallel, each in blocks of model.block tokens
    split: int = 1  # micro-batches of streams per optimizer update
    lr: float  # peak learning rate of Adam
    warmup: int = 0  # updates over which lr rises from 0
    schedule: Literal["constant", "cosine"] = "constant"  # after the warmup
    min_lr: float = 0.0  # final lr of the cosine schedule
    betas: tuple[float, float] = (0.9, 0.999)  # decay rates of Adam's two moments
    eps: float = 1e-8  # term in Adam's denominator
    weight_decay: float = 0.0  # decoupled, on matrices only
    # Optimizer of the routers' matrices alone. Adam divides by the size of each feature's gradient,
    # which undoes any scaling that all clusters share; plain SGD does not.
    router_optimizer: Literal["adam", "sgd"] = "adam"
    router_lr: float | None = None  # peak lr of router_optimizer='sgd', scheduled like lr; None: lr
    clip: float | None = None  # greatest gradient norm; None: no clipping, as in the paper
    precision: Precision = "fp32"  # bf16: autocast; weights and optimizer stay float32
    seed: int = 0  # draws first weights, dropout and noise
    log_every: int = 10  # steps between lines of metrics.jsonl
    eval_every: int = 1000  # steps between validations
    eval_batch: int = 8  # rows of the validation split read in parallel
    eval_tokens: int | None = None  # validate on the first `eval_tokens` only; None: on all
    checkpoint_every: int = 1000  # steps between checkpoints
    keep: int = 2  # number of latest checkpoints kept, beside the best one
    compile: bool = False  # torch.compile each block
    graph: bool = False  # replay updates as CUDA graphs, faster where launches dominate
    device: str = "auto"  # auto: the first of cuda, xpu, mps and cpu that torch finds
    # Processes that train together, started by torchrun.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_updates(self, rows="streams")
        check_parallel(self, rows="streams")
        check_pipeline(self, blocks=len(self.model.sequence))
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
        """The length of the run in the paper's epochs of 1000 updates."""
        return self.steps / UPDATES_PER_EPOCH

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.block


def override_run(config: RunConfig, pairs: Sequence[str]) -> RunConfig:
    """Return the run with `key=value` overrides applied; see `acmoe.config.overrides`.

    The name of a router, or of a router's base, is converted to a config by `language_router`, as
    in `create_model`.
    """
    changed = override(
        config, pairs, named=lambda owner, name, value: language_router(value, config.model)
    )
    model = changed.model
    router = with_vocabulary(model.router, model.vocab_size)
    for key in ("model.router.vocab_size", "model.router.base.vocab_size"):
        given = next((pair for pair in pairs if pair.startswith(f"{key}=")), None)
        check(
            given in (None, f"{key}={model.vocab_size}", f"{key}=none"),
            f"{given}: the router reads the token ids of the model, of which there are "
            f"{model.vocab_size}; leave it out, or set model.vocab_size",
        )
    return replace(changed, model=replace(model, router=router))
