"""The metrics of validation records, by which runs are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ValidationMetric:
    """A field of the validation records in metrics.jsonl."""

    key: str
    label: str
    lower: bool  # less is better


LOSS = ValidationMetric(key="loss", label="validation loss (nats)", lower=True)
# A run's metric is the first of these that its records hold.
METRICS = (
    ValidationMetric(key="top1", label="validation top-1 (%)", lower=False),
    ValidationMetric(key="bits_per_byte", label="validation bits per byte", lower=True),
    ValidationMetric(key="perplexity", label="validation perplexity", lower=True),
    ValidationMetric(key="dev_accuracy", label="development accuracy (%)", lower=False),
    LOSS,
)


def metric_in(records: Sequence[Mapping[str, Any]]) -> ValidationMetric | None:
    """Return the metric of these validation records; None where they hold none."""
    held = (metric for metric in METRICS if any(metric.key in record for record in records))
    return next(held, None)
