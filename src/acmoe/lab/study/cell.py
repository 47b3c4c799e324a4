"""One run of a study as data: the training config, the tests, and the condition it stands for."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from acmoe.config.images.attack import AttackConfig
from acmoe.config.routing import Statistics
from acmoe.config.serialize import encode
from acmoe.config.text.finetune import FinetuneConfig
from acmoe.lab.variants.config import as_in_0_1

# Fields that do not enter a digest: paths of files and the device do not identify a run.
_PATH_FIELDS = {"folder", "source", "device", "threads", "parallel"}
# Fields that were added after the first results: a field of the same config, the added field, and
# the value that held before. The field is left out of the digest where it has that value, so that
# digests of earlier results stay valid.
_ADDED_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("augment", "compile", False),
    ("holdout", "on_device", False),
    ("attack", "precision", "fp32"),
    ("tasks", "rates", []),
    ("tasks", "divergence", None),
    ("tasks", "routing_tokens", None),
    ("min_tokens", "mean_over", "all"),
    ("clamp", "mean_before_clamp", False),
    ("expert_init", "plain_router", None),
    ("normalize_embeddings", "embedding_length", None),
    ("augment", "eval_capacity", "model"),
    ("augment", "ema", None),
    ("mixup", "repeats", 1),
    ("distance", "fade_steps", None),
)


@dataclass(frozen=True, kw_only=True)
class TextTests:
    """The tests of a trained language model."""

    tokens: int | None = None  # scored tokens of each text; None: all
    rows: int = 32  # rows the text is cut into; they form a batch
    # Adaptive routers with batch statistics are scored in these modes as well.
    statistics: tuple[Statistics, ...] = ("running",)
    others: tuple[tuple[str, str], ...] = ()  # further texts: (name, .npy file of token ids)
    tasks: tuple[FinetuneConfig, ...] = ()  # finetuning tasks, each from the same weights
    task_folder: str = ""  # contains a folder for each task
    # Further rates of contamination, beside the default; with any, `others` are corrupted as well.
    rates: tuple[float, ...] = ()
    # A run whose last validation loss is this many nats above its best, or whose loss is no longer
    # finite, is recorded as diverged. None: the former is not looked for, the latter is a failure.
    divergence: float | None = None
    # Length of the validation text on which routing is measured at every validation; None: never.
    routing_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ImageTests:
    """The tests of a trained image classifier."""

    batch: int = 128
    images: int | None = None  # scored images of the test split; None: all
    attacks: tuple[AttackConfig, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NoTests:
    """No tests after training: the run measures itself."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a study. Cells of one setting and one seed differ only in their condition.

    The seed determines initial weights, order of the data and contaminated texts, so two conditions
    of one seed form a pair.
    """

    study: str
    setting: str  # name of the model, data and all else that compared conditions share
    condition: str  # name of the compared router, such as "adaptive-previous"
    factors: Mapping[str, str | int | float] = field(default_factory=dict)
    seed: int
    size: str  # length of training in words; different sizes are never compared
    data: str  # fingerprint of the training data
    config: Any  # acmoe.lab.study.worker.RUNNERS has a runner for its type
    tests: TextTests | ImageTests | NoTests = NoTests()

    @property
    def name(self) -> str:
        """The name shown to the user."""
        return f"{self.setting} / {self.condition} / seed {self.seed}"

    @cached_property
    def digest(self) -> str:
        """A hash that identifies the cell, equal on all machines."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return everything the figures depend on."""
        return {
            "study": self.study,
            "setting": self.setting,
            "condition": self.condition,
            "factors": dict(self.factors),
            "seed": self.seed,
            "size": self.size,
            "data": self.data,
            "config": without_paths(as_in_0_1(encode(self.config))),
            "tests": without_paths(encode(self.tests)),
        }


def without_paths(value: Any) -> Any:
    """Remove paths, and added fields that have their earlier value, from an encoded config."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in _PATH_FIELDS}
        if "others" in kept:
            kept["others"] = [name for name, _ in kept["others"]]
        kept.pop("task_folder", None)
        if "keep" in kept:
            kept["keep"] = 1  # the default of the first records; it enters no figure
        for sibling, name, before in _ADDED_FIELDS:
            if sibling in kept and kept.get(name) == before:
                kept.pop(name, None)
        if "attack" in kept and kept.get("capacity", 0) in ("model", None):
            kept["dropless"] = kept.pop("capacity") is None  # the field's name before
        return {key: without_paths(item) for key, item in kept.items()}
    return [without_paths(item) for item in value] if isinstance(value, list) else value


def seeds_major(cells: list[Cell]) -> list[Cell]:
    """Sort by seed, so that an interrupted study leaves complete pairs."""
    return sorted(cells, key=lambda cell: cell.seed)
