"""Read the robustness figures of a run from the files that hold them.

RUN/attacks/report-*.json   written by `acmoe attack`
RUN/evaluation*.json        written by `acmoe evaluate RUN --contaminate ...`
RUN/shift*.json             written by `acmoe shift RUN ... --json > FILE`
RUN/../comparison.json      written by `acmoe demo` beside its two runs
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from acmoe.config.images.attack import attack_config, eps_text
from acmoe.config.images.train import VISION_RUNS
from acmoe.config.serialize import encode
from acmoe.data.text.swaps import SwapReport
from acmoe.errors import UserError
from acmoe.evaluate.images.capacity import capacity_text
from acmoe.evaluate.run import ATTACKS, LANGUAGE_RUN, read_json
from acmoe.report.runs import RunFacts
from acmoe.report.scores import no_report, read_evaluations


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure, and the figure of the clean data it is compared with."""

    what: str  # the attack, shift or contamination; runs with equal text are comparable
    unit: str
    lower: bool  # less is better
    clean: float | None
    value: float
    chance: float | None = None
    details: str = ""  # the options that the figure depends on
    source: str  # name of the file that holds it


Reader = Callable[[dict[str, Any], str], list[Measured]]


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """All robustness figures of a run."""

    figures: tuple[Measured, ...]
    notes: tuple[str, ...]  # one line per file that could not be read
    command: str  # a command that would measure robustness

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def robustness(run: RunFacts) -> Robustness:
    """Read every figure found for a run. A damaged file becomes a note."""
    found: list[Measured] = []
    notes: list[str] = []
    for path, document, reader in _documents(run.folder, notes):
        try:
            found += reader(document, str(path.relative_to(run.folder)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            notes.append(no_report(path, error))
    if not any("replaced" in one.what for one in found):
        found += _demo(run, notes)
    return Robustness(figures=tuple(found), notes=tuple(notes), command=_command(run))


def _documents(folder: Path, notes: list[str]) -> Iterator[tuple[Path, dict[str, Any], Reader]]:
    """Yield each report in a run's folder with its reader; a damaged file adds a note."""
    for path, document, note in read_evaluations(folder):
        if note is None:
            yield path, document, _evaluation
        else:
            notes.append(note)
    for pattern, reader in ((f"{ATTACKS}/report-*.json", _attacks), ("shift*.json", _shift)):
        for path in sorted(folder.glob(pattern)):
            try:
                yield path, read_json(path), reader
            except UserError as error:
                notes.append(str(error))


def _command(run: RunFacts) -> str:
    if run.kind in VISION_RUNS:
        return f"acmoe attack {run.folder} --attack pgd"
    if run.kind == LANGUAGE_RUN and not run.finetuned:
        rate = 0.05 if run.metric.key == "bits_per_byte" else 0.025
        return f"acmoe evaluate {run.folder} --contaminate {rate}"
    return ""


_BOUNDS = {True: "clamped to the range of pixels", False: "not clamped to the range of pixels"}


def _attacks(document: dict[str, Any], source: str) -> list[Measured]:
    name, bound = document["attack"]["name"], _BOUNDS[bool(document["clamp"])]
    settings = (
        f"{document['images']} images of the {document['split']} split in batches of "
        f"{document['batch']}; attacked in {document['space']} space, {bound}, with "
        f"{document['labels']} labels; statistics mode {document['statistics']}; expert capacity "
        f"{capacity_text(document.get('capacity'))}; checkpoint of step {document['step']}"
    )
    found = []
    for figure in document["figures"]:
        moved = ""
        if figure["moved"]:
            moved = f"; the attack sends {fmean(figure['moved']):.1f}% of tokens to another expert"
        found.append(
            Measured(
                what=f"{name}, radius {eps_text(figure['eps'])}{_attack_variant(document)}",
                unit="top-1 (%)",
                lower=False,
                clean=float(document["clean_top1"]),
                value=float(figure["top1"]),
                details=settings + moved,
                source=source,
            )
        )
    return found


def _attack_variant(document: dict[str, Any]) -> str:
    """Return all settings of an attack that differ from the defaults, as text."""
    attack = document["attack"]
    usual = encode(attack_config(attack["name"]).attack)
    other = [
        f", {key.replace('_', ' ')} {value}"
        for key, value in attack.items()
        if value != usual.get(key)
    ]
    space = ", normalised pixels" if document["space"] == "normalized" else ""
    bound = "" if document["clamp"] else ", not clamped"
    labels = "" if document["labels"] == "true" else f", {document['labels']} labels"
    return "".join(other) + space + bound + labels + _split(document) + _variant(document)


def _split(document: dict[str, Any]) -> str:
    return "" if document["split"] == "test" else f", {document['split']} split"


def _variant(document: dict[str, Any]) -> str:
    """Return the end of a figure's name: a capacity or averaged weights make it another figure."""
    capacity = document.get("capacity")
    limit = "" if capacity is None else f", capacity {capacity:g}"
    return limit + (", averaged weights" if document.get("ema") else "")


def _evaluation(document: dict[str, Any], source: str) -> list[Measured]:
    """Read figures of contaminated text, each with that of clean text in the same mode."""
    if document.get("contamination") is None:
        return []
    figures = document["figures"]
    clean = {one["statistics"]: one["value"] for one in figures if not one["contaminated"]}
    unit = "bytes" if document["metric"] == "bits per byte" else "words"
    rate = SwapReport(**document["contamination"]).word_rate
    seed = document.get("contamination_config", {}).get("seed")  # absent in version 0.1
    drawn = f", seed {seed}" if seed else ""
    return [
        Measured(
            what=f"{rate:.1%} of {unit} replaced{drawn}{_split(document)}",
            unit=document["metric"],
            lower=True,
            clean=clean.get(one["statistics"]),
            value=float(one["value"]),
            details=f"{one['tokens']:,} tokens of the {document['split']} split, read in "
            f"{document['batch']} rows and blocks of {document['block']}; statistics mode "
            f"{one['statistics']}; checkpoint of step {document['step']}",
            source=source,
        )
        for one in figures
        if one["contaminated"]
    ]


def _shift(document: dict[str, Any], source: str) -> list[Measured]:
    # Absent in version 0.1.
    step = f"; checkpoint of step {document['step']}" if "step" in document else ""
    return [
        Measured(
            what=str(document["shift"]) + _variant(document),
            unit=str(document["metric"]),
            lower=False,
            clean=None,
            value=float(document["value"]),
            chance=float(document["chance"]),
            details=f"{document['images']} images, classified among {document['classes']} classes; "
            f"statistics mode {document['statistics']}; expert capacity "
            f"{capacity_text(document.get('capacity'))}{step}",
            source=source,
        )
    ]


def _demo(run: RunFacts, notes: list[str]) -> list[Measured]:
    """Read the demo's figures if this run is one of the demo's two runs."""
    path = run.folder.resolve().parent / "comparison.json"
    if not path.is_file():
        return []
    try:
        document = read_json(path)
        if document["seed"] != run.seed or document["steps"] != run.steps:
            return []  # the file is from another demo in the same folder
        return [
            Measured(
                what=f"{document['replaced']:.1%} of bytes replaced",
                unit="bits per byte",
                lower=True,
                clean=float(row["bits_per_byte"]),
                value=float(row["contaminated"]),
                details=f"{document['test_tokens']:,} bytes of the test split",
                source=str(Path("..") / path.name),
            )
            for row in document["rows"]
            if row["router"].lower() == run.folder.resolve().name
        ]
    except UserError as error:
        notes.append(str(error))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        notes.append(f"{path} is no comparison that acmoe wrote ({error!r}); left out")
    return []
