"""What to score a trained model on, and how."""

from dataclasses import dataclass
from typing import Literal

from acmoe.config.routing import Statistics
from acmoe.config.text.data import ContaminationConfig
from acmoe.config.text.train import Precision
from acmoe.errors import check, check_choice


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """An evaluation. Whatever a figure depends on stands here, and again in the report."""

    split: Literal["valid", "test"] = "test"
    which: Literal["best", "last"] = "best"  # checkpoint of a run
    # Statistics modes of the adaptive routers, one figure each; empty: the model's own.
    statistics: tuple[Statistics, ...] = ()
    contamination: ContaminationConfig | None = None  # score the corrupted text as well
    batch: int = 8  # rows the split is cut into; fewer rows give more context
    block: int | None = None  # tokens of a forward pass in each row; None: as in training
    precision: Precision | None = None  # None: as in training, fp32 for a bare model
    routing: bool = False  # also measure load balance and instability of every MoE layer
    seed: int = 0  # of routers that draw at random

    def __post_init__(self) -> None:
        check_choice(self.split, ("valid", "test"), "split")
        check_choice(self.which, ("best", "last"), "which")
        for mode in self.statistics:
            check_choice(mode, ("batch", "running", "prefix", "sequence"), "statistics")
        check(self.batch >= 1, f"batch={self.batch}; it must be at least 1")
        check(self.block is None or self.block >= 1, f"block={self.block}; it must be at least 1")
        if self.precision is not None:
            check_choice(self.precision, ("fp32", "bf16"), "precision")
