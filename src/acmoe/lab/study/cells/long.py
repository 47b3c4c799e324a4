"""What long runs record beside the figures of every text cell: routing and divergence."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from acmoe.config.text.train import RunConfig
from acmoe.data.text.corpus import Corpus
from acmoe.evaluate.language import score_stream
from acmoe.lab.study.cells.outcome import Curve, Outcome, routing_metrics, scale_metrics
from acmoe.lab.study.cells.scale_statistics import model_scale_statistics
from acmoe.lab.study.cells.training import curve_of, records_of
from acmoe.train.text import TextTrainer
from acmoe.train.trainer import eager

# Routing measures at every validation; a model without them leaves its curve out.
ROUTING_CURVES = (
    "load_balance",
    "instability",
    "instability_chance",
    "scale_rms_log",
    "scale_common",
)


class RoutingValidation(NamedTuple):
    """A score of the validation split, its settings, and measures of the routing."""

    loss: float  # mean nats per token
    tokens: int
    statistics: str
    batch: int
    block: int
    routing: Mapping[str, float]  # by the names of ROUTING_CURVES


class RoutingTrainer(TextTrainer):
    """Measures the routing at every validation, on the first `routing_tokens` tokens."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, device: torch.device, routing_tokens: int
    ) -> None:
        super().__init__(config, corpus, device)
        self.routing_tokens = routing_tokens

    def validate(self) -> RoutingValidation:  # type: ignore[override]
        """Score the validation split, then run its beginning again with recorded routing.

        Only the second pass records: recording leaves the model's fast path.
        """
        score = super().validate()
        with eager(self.config.compile):
            recorded = score_stream(
                self.model,
                self.corpus["valid"][: self.routing_tokens],
                batch=score.batch,
                block=score.block,
                precision=self.config.precision,
                routing=True,
            )
        scales = model_scale_statistics(self.model)
        routing = {**routing_metrics(recorded.layers), **scale_metrics(scales)}
        return RoutingValidation(*score, routing=routing)


def routing_curves(folder: Path) -> dict[str, Curve]:
    """Return the measures of the routing over the optimizer steps."""
    records = [record for record in records_of(folder, "valid") if "routing" in record]
    curves = {
        name: [(one["step"], one["routing"][name]) for one in records if name in one["routing"]]
        for name in ROUTING_CURVES
    }
    return {name: curve for name, curve in curves.items() if curve}


def divergence(losses: Sequence[tuple[int, float]], limit: float) -> dict[str, float]:
    """Tell from the validation losses, in nats, whether a run has diverged.

    `rise` is the greatest rise of a loss above the best one before it.
    """
    values = [loss for _, loss in losses]
    best = list(accumulate(values, min))
    rises = [value - least for value, least in zip(values, best, strict=True)]
    return {"diverged": float(rises[-1] > limit), "rise": max(rises)}


def stopped_outcome(folder: Path, config: RunConfig, metric: str, error: str) -> Outcome:
    """Return the outcome of a run whose loss or gradient was no longer finite.

    It has no figures to compare, only curves up to that step.
    """
    valid = curve_of(folder, "valid", metric.replace(" ", "_"))
    train = records_of(folder, "train")
    metrics: dict[str, float] = {"diverged": 1.0}
    if train:
        metrics["train_seconds"] = train[-1]["seconds"]
        metrics["tokens_trained"] = float(train[-1]["step"] * config.tokens_per_step)
    details: dict[str, Any] = {"metric": metric, "stopped": error}
    curves = {"valid": valid, "train_loss": curve_of(folder, "train", "loss")}
    return Outcome(metrics=metrics, curves=curves | routing_curves(folder), details=details)
