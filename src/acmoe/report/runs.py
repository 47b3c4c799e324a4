"""Read a run's folder without loading its model: config, metrics, and whether it is training.

A run that is still training, was stopped or crashed is read as far as it got.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from acmoe.config.images.train import VISION_RUNS
from acmoe.config.serialize import flatten
from acmoe.data.images.load import load_images
from acmoe.errors import UserError, check, is_finite
from acmoe.evaluate.run import (
    CONFIG,
    METRICS,
    checked_metrics,
    open_image_run,
    read_json,
    run_kind,
)
from acmoe.evaluate.starts import Start, read_starts
from acmoe.evaluate.validation import LOSS, ValidationMetric, metric_in
from acmoe.report.scores import Score, read_scores
from acmoe.storage.sealed import read_object
from acmoe.train.run_folder import LOCK

if sys.platform != "win32":
    import fcntl

ROUTING = "routing.json"  # written by `acmoe analyze --hf`
HF_MODEL = "hf-model"  # the kind of such a folder: a model of transformers, without curves

Record = dict[str, Any]
State = Literal["finished", "training", "stopped", "not started", "analyzed"]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The state of a run as its folder holds it."""

    folder: Path
    name: str
    kind: str
    settings: dict[str, Any]  # dotted name -> value
    train: tuple[Record, ...]
    valid: tuple[Record, ...]
    # Length of the whole run; None if it is given in epochs of images that are not on this machine.
    steps: int | None
    in_use: bool  # a process holds the folder's lock
    notes: tuple[str, ...]  # one line per problem of the folder
    starts: tuple[Start, ...] = ()  # empty: a run of a version that did not record them
    tested: tuple[Score, ...] = ()

    @property
    def router(self) -> str:
        return str(self.settings.get("model.router.name", "unknown"))

    @property
    def seed(self) -> int | None:
        return self.settings.get("seed")

    @property
    def step(self) -> int:
        """Return the last recorded step."""
        return max((record["step"] for record in (*self.train, *self.valid)), default=0)

    @property
    def state(self) -> State:
        if self.kind == HF_MODEL:
            return "analyzed"
        if self.steps is not None and self.step >= self.steps:
            return "finished"
        if self.in_use:
            return "training"
        return "stopped" if self.step else "not started"

    @property
    def metric(self) -> ValidationMetric:
        return metric_in(self.valid) or LOSS

    def scores(self) -> dict[int, float]:
        """Map each validated step to the metric, where that is a finite number."""
        key = self.metric.key
        return {
            record["step"]: float(record[key])
            for record in self.valid
            if isinstance(record.get(key), int | float) and is_finite(record[key])
        }

    @property
    def finetuned(self) -> bool:
        """Return whether this is a finetuning on sentences, whose steps are epochs."""
        return "task" in self.settings

    def best(self) -> tuple[int, float] | None:
        """Return step and value of the best validation; of equal ones the earliest, as training."""
        sign = 1 if self.metric.lower else -1
        ranked = sorted((sign * value, step, value) for step, value in self.scores().items())
        return (ranked[0][1], ranked[0][2]) if ranked else None


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders among `paths` and directly inside them, without duplicates.

    Runs with plain routers come first among those inside a folder.
    """
    found: list[Path] = []
    for path in paths:
        check(path.is_dir(), f"{path} is no folder; give the folder of a run, such as runs/demo")
        if (own := _run_in(path)) is not None:
            found.append(own)
            continue
        inside = [run for one in path.iterdir() if one.is_dir() and (run := _run_in(one))]
        check(
            bool(inside),
            f"{path} is no run: {path / CONFIG} is missing, and no folder in it is one; give a "
            "folder `acmoe train` or `acmoe analyze --hf` wrote",
        )
        found += sorted(inside, key=_plain_first)
    first_spelling: dict[Path, Path] = {}
    for folder in found:
        first_spelling.setdefault(folder.resolve(), folder)
    return list(first_spelling.values())


def _run_in(path: Path) -> Path | None:
    """Return the folder of the run at `path`, or of its analysis by `acmoe analyze --hf`."""
    for folder, name in ((path, ROUTING), (path / "analysis", ROUTING), (path, CONFIG)):
        if (folder / name).is_file():
            return folder
    return None


def _plain_first(folder: Path) -> tuple[bool, str]:
    if (folder / ROUTING).is_file():
        return read_routing_file(folder)["router"] == "adaptive", str(folder)
    document = read_json(folder / CONFIG)
    return flatten(document).get("config.model.router.name") == "adaptive", folder.name


def read_runs(folders: Sequence[Path]) -> list[RunFacts]:
    """Read every run, and give each a name that differs from the others."""
    places = [folder.resolve() for folder in folders]
    # An analysis inside the folder of a model has the name of the model.
    inner = [place.name == "analysis" and (place / ROUTING).is_file() for place in places]
    names = _short_names([p.parent if one else p for p, one in zip(places, inner, strict=True)])
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def _short_names(places: list[Path]) -> list[str]:
    """Return the last parts of each path, as many as are needed to make all names differ."""
    longest = max((len(place.parts) for place in places), default=1)
    for count in range(1, longest + 1):
        names = ["/".join(place.parts[-count:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return [str(place) for place in places]


def read_run(folder: Path, name: str) -> RunFacts:
    """Read a run's folder as it is now. Damaged parts of its metrics become notes.

    Raises:
        UserError: there is no config.json, or it is not one that `train` wrote.
    """
    if (folder / ROUTING).is_file():
        return _read_model(folder, name)
    kind = run_kind(folder)
    config = read_json(folder / CONFIG).get("config")
    if not isinstance(config, dict):
        raise UserError(
            f"{folder / CONFIG} lacks 'config'; it was not written by acmoe (a model of "
            f"transformers needs `acmoe analyze --hf {folder} --text FILE` first)"
        )
    records, notes = _records(folder / METRICS)
    steps, length_note = _steps(folder, kind, config)
    starts, start_notes = read_starts(folder)
    tested, score_notes = read_scores(folder)
    return RunFacts(
        folder=folder,
        name=name,
        kind=kind,
        settings=flatten(config),
        train=tuple(record for record in records if record["kind"] in ("train", "epoch")),
        valid=tuple(record for record in records if record["kind"] in ("valid", "epoch")),
        steps=steps,
        in_use=_in_use(folder / LOCK),
        notes=(*notes, *length_note, *start_notes, *score_notes),
        starts=starts,
        tested=tested,
    )


def _read_model(folder: Path, name: str) -> RunFacts:
    """Describe a model of transformers as a run that was not trained here.

    Its settings are its config.
    """
    document = read_routing_file(folder)
    settings = {"model.router.name": document["router"], "sample.loss": document["loss"]}
    return RunFacts(
        folder=folder,
        name=name,
        kind=HF_MODEL,
        settings={**settings, **flatten({"model": document["settings"]})},
        train=(),
        valid=(),
        steps=None,
        in_use=False,
        notes=(),
    )


def read_routing_file(folder: Path) -> Record:
    """Read what `acmoe analyze --hf` wrote for the page; raise where it is damaged."""
    path, again = folder / ROUTING, "run acmoe analyze --hf again"
    document = read_object(path, fix=again)
    check(
        document.get("kind") == HF_MODEL and {"router", "loss", "settings"} <= document.keys(),
        f"{path} was not written by acmoe analyze --hf; {again}",
    )
    return document


def _records(path: Path) -> tuple[list[Record], list[str]]:
    """Return the complete records, and one line for each kind of line that was left out."""
    if not path.is_file():
        return [], [f"{path.name} is not there yet: nothing has been measured"]
    records, notes = checked_metrics(path.parent)
    return records, [note.replace(str(path), path.name) for note in notes]


def _steps(folder: Path, kind: str, config: Record) -> tuple[int | None, list[str]]:
    """Return the run's length in updates, or None with a note that says why it is unknown.

    A length in epochs of images is known only where the images can be counted.
    """
    for name in ("steps", "epochs"):
        check(
            type(config.get(name)) in (int, float, NoneType) and is_finite(config.get(name) or 0),
            f"{folder / CONFIG} has {name}={config.get(name)!r}; it was not written by acmoe",
        )
    if config.get("steps") is not None:
        return int(config["steps"]), []
    if kind not in VISION_RUNS:
        return config.get("epochs"), []
    try:
        run = open_image_run(folder)
        images = len(load_images(run.config.data).train)
    except UserError as error:
        return None, [f"its length in steps is not known: {error}"]
    return run.config.updates(images // run.config.batch), []


def _in_use(path: Path) -> bool:
    """Return whether a process is training in this folder.

    Trying the lock takes it for a moment, and a trainer that starts just then would be turned
    away. The lock is therefore tried only if the process named in it is alive.
    """
    if sys.platform == "win32" or not path.is_file():
        return False
    try:
        os.kill(int(path.read_text(encoding="utf-8")), 0)
    except PermissionError:
        pass  # the process is alive and belongs to another user
    except (ValueError, OSError):
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
