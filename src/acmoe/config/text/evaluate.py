"""Config of the evaluation of a language model."""

from dataclasses import dataclass
from typing import Literal, get_args

from acmoe.config.routing import Statistics
from acmoe.config.text.data import ContaminationConfig
from acmoe.config.updates import Precision
from acmoe.errors import check, check_choice, check_distinct


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """An evaluation. The report repeats every setting that its figures depend on."""

    split: Literal["valid", "test"] = "test"  # the part of the text that is scored
    which: Literal["best", "last"] = "best"  # checkpoint of a run
    # Statistics modes of adaptive routers, one figure for each; empty: the model's own mode.
    statistics: tuple[Statistics, ...] = ()
    contamination: ContaminationConfig | None = None  # also score text corrupted in this way
    batch: int = 8  # rows the split is cut into; fewer rows mean more context
    block: int | None = None  # tokens per row and forward pass; None: as in training
    precision: Precision | None = None  # None: as in training, fp32 for a bare model
    routing: bool = False  # also report load balance and instability of every MoE layer
    seed: int = 0  # draws the choices of random routers

    def __post_init__(self) -> None:
        check_choice(self.split, ("valid", "test"), "split")
        check_choice(self.which, ("best", "last"), "which")
        for mode in self.statistics:
            check_choice(mode, get_args(Statistics), "statistics")
        check_distinct(self.statistics, "statistics")
        check(self.batch >= 1, f"batch={self.batch}; it must be at least 1")
        check(
            self.block is None or 1 <= self.block < 2**31,
            f"block={self.block}; it must be at least 1 and less than 2**31",
        )
        if self.precision is not None:
            check_choice(self.precision, ("fp32", "bf16"), "precision")
