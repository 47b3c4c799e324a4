"""The report of a language model's evaluation: its scores, with all settings they depend on."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from acmoe.config.text.data import ContaminationConfig
from acmoe.config.updates import Precision
from acmoe.data.text.corpus import Corpus
from acmoe.data.text.swaps import SwapReport
from acmoe.errors import UserError
from acmoe.evaluate.routing import LayerReport

Metric = Literal["bits per byte", "perplexity"]


class Score(NamedTuple):
    loss: float  # mean nats per token
    tokens: int  # predictions made
    layers: tuple[LayerReport, ...]  # one per MoE layer, if requested


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The score of one pass over the split."""

    statistics: str  # mode of adaptive routers; "none" if the model has none
    contaminated: bool
    loss: float  # mean nats per token
    value: float  # the loss in units of the report's metric
    tokens: int
    layers: tuple[LayerReport, ...]

    @classmethod
    def of(cls, score: Score, mode: str, contaminated: bool, metric: Metric) -> "Figure":
        value = value_of(score.loss, metric)
        return cls(statistics=mode, contaminated=contaminated, value=value, **score._asdict())


@dataclass(frozen=True, kw_only=True)
class LanguageReport:
    """Results of a language model, with all settings that they depend on."""

    corpus: str
    split: str
    metric: Metric
    batch: int
    block: int
    precision: Precision
    step: int | None  # step of the run's checkpoint; None for a bare model
    contamination: SwapReport | None  # counts of replaced tokens; None: clean text only
    figures: tuple[Figure, ...]
    contamination_config: ContaminationConfig | None = None  # None: clean text only

    def figure(self, *, contaminated: bool = False, statistics: str | None = None) -> Figure:
        """Return the first figure with those properties; statistics=None matches any mode."""
        for figure in self.figures:
            if figure.contaminated == contaminated and statistics in (None, figure.statistics):
                return figure
        known = [f"{one.contaminated}, {one.statistics!r}" for one in self.figures]
        raise UserError(
            f"no figure with contaminated={contaminated}, statistics={statistics!r}; this report "
            f"has {' and '.join(known)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields; reports of clean text alone have no `contamination_config`."""
        absent = () if self.contamination_config else ("contamination_config",)
        return {key: value for key, value in asdict(self).items() if key not in absent}


def metric_of(corpus: Corpus) -> Metric:
    return "bits per byte" if corpus.kind == "bytes" else "perplexity"


def value_of(loss: float, metric: Metric) -> float:
    """Convert nats per token to bits, or to perplexity, which is capped to stay finite."""
    return loss / math.log(2) if metric == "bits per byte" else math.exp(min(loss, 700.0))
