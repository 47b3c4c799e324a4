"""One run of a study as data: what is trained, what is asked of it, what it is compared with."""

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

# Where a file lies, and on which device it is read, is no part of what was asked.
_PLACES = {"folder", "source", "device", "threads"}
# Fields that came after the first results: beside which other one, the name, and what held before.
# Left out where it still holds, so that a cell is known again by its earlier results.
_LATER = (
    ("augment", "compile", False),
    ("holdout", "on_device", False),
    ("attack", "precision", "fp32"),
)


@dataclass(frozen=True, kw_only=True)
class TextTests:
    """What a trained language model is asked."""

    tokens: int | None = None  # of each text; None: all of it
    rows: int = 32  # the text is cut into, read side by side
    # Adaptive routers that take batch statistics are scored in these modes too.
    statistics: tuple[Statistics, ...] = ("running",)
    others: tuple[tuple[str, str], ...] = ()  # further texts: name, and file of token ids (.npy)
    tasks: tuple[FinetuneConfig, ...] = ()  # finetuned on, each from the same weights
    task_folder: str = ""  # holds a folder for each task


@dataclass(frozen=True, kw_only=True)
class ImageTests:
    """What a trained image classifier is asked."""

    batch: int = 128
    images: int | None = None  # of the test split; None: all
    attacks: tuple[AttackConfig, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NoTests:
    """The run measures itself."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Cells of one setting and one seed differ in their condition alone.

    The seed gives the first weights, the order of the data and the corrupted texts, so that two
    conditions of one seed are a pair.
    """

    study: str
    setting: str  # model, data and everything else the compared conditions share
    condition: str  # what is compared, such as "adaptive-previous"
    factors: Mapping[str, str | int | float] = field(default_factory=dict)
    seed: int
    size: str  # how long and on how much, in words: other sizes are never compared
    data: str  # fingerprint of what is trained on
    config: Any  # of a type that acmoe.lab.study.worker has a runner for
    tests: TextTests | ImageTests | NoTests = NoTests()

    @property
    def name(self) -> str:
        return f"{self.setting} / {self.condition} / seed {self.seed}"

    @cached_property
    def digest(self) -> str:
        """Tells a cell from every other; equal on all machines."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Everything a figure depends on."""
        return {
            "study": self.study,
            "setting": self.setting,
            "condition": self.condition,
            "factors": dict(self.factors),
            "seed": self.seed,
            "size": self.size,
            "data": self.data,
            "config": placeless(encode(self.config)),
            "tests": placeless(encode(self.tests)),
        }


def placeless(value: Any) -> Any:
    """An encoded config without the places its files have on this machine, or later fields."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in _PLACES}
        if "others" in kept:
            kept["others"] = [name for name, _ in kept["others"]]
        kept.pop("task_folder", None)
        for beside, name, before in _LATER:
            if beside in kept and kept.get(name) == before:
                del kept[name]
        return {key: placeless(item) for key, item in kept.items()}
    return [placeless(item) for item in value] if isinstance(value, list) else value


def seeds_major(cells: list[Cell]) -> list[Cell]:
    """All conditions of a seed before the next seed: an interruption leaves complete pairs."""
    return sorted(cells, key=lambda cell: cell.seed)
