"""Measure what long runs record beside the figures of every text cell: routing and divergence.

Each validation writes its measures of the routing into metrics.jsonl, so that they survive a kill.
"""

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
from acmoe.lab.study.cells.separation import (
    SEPARATION,
    LayerValues,
    layer_separation,
    separation_means,
)
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
    *SEPARATION,
)


class RoutingValidation(NamedTuple):
    """A score of the validation split, its settings, and measures of the routing."""

    loss: float  # mean nats per token
    tokens: int
    statistics: str
    batch: int
    block: int
    routing: Mapping[str, float]  # means over layers, by the names of ROUTING_CURVES
    layers: LayerValues  # the same measures by layer; None where a layer has no such value


class RoutingTrainer(TextTrainer):
    """Measures the routing at every validation, on the first `routing_tokens` tokens."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, device: torch.device, routing_tokens: int
    ) -> None:
        super().__init__(config, corpus, device)
        self.routing_tokens = routing_tokens

    def validate(self) -> RoutingValidation:  # type: ignore[override]
        """Score the validation split, then run its beginning twice again with recorded routing.

        Only these passes record: recording leaves the model's fast path. They draw no number of the
        training's random stream and change no running average.
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
            separation = layer_separation(
                self.model,
                self.corpus["valid"],
                tokens=self.routing_tokens,
                precision=self.config.precision,
            )
        scales = model_scale_statistics(self.model)
        routing = {
            **routing_metrics(recorded.layers),
            **scale_metrics(scales),
            **separation_means(separation),
        }
        layers = {
            name: [getattr(layer, name) for layer in recorded.layers]
            for name in ("load_balance", "instability", "chance", "adjusted_rand")
        }
        return RoutingValidation(*score, routing=routing, layers={**layers, **separation})


def routing_curves(folder: Path) -> dict[str, Curve]:
    """Return the measures of the routing over the optimizer steps."""
    records = [record for record in records_of(folder, "valid") if "routing" in record]
    curves = {
        name: [(one["step"], one["routing"][name]) for one in records if name in one["routing"]]
        for name in ROUTING_CURVES
    }
    return {name: curve for name, curve in curves.items() if curve}


def layer_series(folder: Path) -> dict[str, Any]:
    """Return the measures of every layer at every validation, as lists [step][layer] by measure.

    Return nothing for a run that has none.
    """
    records = [record for record in records_of(folder, "valid") if "layers" in record]
    if not records:
        return {}
    names = records[0]["layers"]
    series = {name: [record["layers"].get(name) for record in records] for name in names}
    return {"routing_by_layer": {"steps": [record["step"] for record in records], **series}}


def separation_metrics(curves: Mapping[str, Curve]) -> dict[str, float]:
    """Return the separation of clusters at the last validation."""
    return {name: curves[name][-1][1] for name in SEPARATION if name in curves}


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
    details: dict[str, Any] = {"metric": metric, "stopped": error, **layer_series(folder)}
    curves = {"valid": valid, "train_loss": curve_of(folder, "train", "loss")}
    return Outcome(metrics=metrics, curves=curves | routing_curves(folder), details=details)
