"""The result of a cell, and the figures that all trained cells have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch

from acmoe.evaluate.routing import LayerReport
from acmoe.lab.study.cells.scale_statistics import ScaleStatistics

# Sends a line about the progress of a cell to the user.
Notify = Callable[[str], None]

Curve = list[tuple[int, float]]  # optimizer step, value


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The figures of one run; conditions are compared by the metrics."""

    metrics: Mapping[str, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)  # by layer, by epoch, settings


def routing_metrics(layers: Sequence[LayerReport]) -> dict[str, float]:
    """Return load balance, instability and its chance level, each the mean over MoE layers."""
    later = [layer for layer in layers if layer.instability is not None]
    found = {"load_balance": fmean(layer.load_balance for layer in layers)} if layers else {}
    if later:
        found["instability"] = fmean(layer.instability or 0.0 for layer in later)
        found["instability_chance"] = fmean(layer.chance or 0.0 for layer in later)
    return found


def scale_metrics(scales: Sequence[ScaleStatistics]) -> dict[str, float]:
    """Return the distance of M from the identity, the mean over adaptive layers."""
    if not scales:
        return {}
    return {
        "scale_rms_log": fmean(scale.rms_log for scale in scales),
        "scale_common": fmean(scale.common for scale in scales),
    }


def step_milliseconds(records: Sequence[Mapping[str, Any]], unit: str, per_step: int) -> float:
    """Return the median step time; the first record, with compilation and warm-up, is left out."""
    speeds: list[float] = [record[f"{unit}_per_second"] for record in records]
    return 1000 * per_step / median(speeds[1:] or speeds)


def curve_mean(curve: Curve) -> float:
    """Return the mean value of a curve over its steps, by the trapezoidal rule."""
    if len(curve) == 1:
        return curve[0][1]
    area = sum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairwise(curve))
    return area / (curve[-1][0] - curve[0][0])


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return the peak GPU memory since the cell started, in GiB; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {"peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
