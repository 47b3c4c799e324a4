"""Read the test scores of a run from the files that `evaluate`, `finetune` and `demo` leave."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from acmoe.config.images.train import VISION_RUNS
from acmoe.errors import UserError, is_finite
from acmoe.evaluate.images.capacity import capacity_text
from acmoe.evaluate.run import LANGUAGE_RUN, read_json
from acmoe.evaluate.saved import EVALUATIONS
from acmoe.evaluate.starts import Start
from acmoe.evaluate.statistics import NONE


@dataclass(frozen=True, kw_only=True)
class Score:
    """One score of a checkpoint on the clean test split."""

    label: str  # such as "test bits per byte"
    lower: bool  # less is better
    value: float
    step: int  # step of the checkpoint
    statistics: str  # mode of adaptive routers; "none" if the model has none
    protocol: str  # data, batch and all else that comparable scores must share
    source: str  # name of the file that holds it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_scores(folder: Path) -> tuple[tuple[Score, ...], list[str]]:
    """Return the test scores in a run's folder, and one line per file that is damaged."""
    found: dict[Score, None] = {}
    notes = []
    for path, document, note in read_evaluations(folder):
        if note is not None:
            notes.append(note)
            continue
        try:
            for score in _scores(document, path.name):
                found.setdefault(score)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            notes.append(no_report(path, error))
    return tuple(found), notes


def read_evaluations(folder: Path) -> Iterator[tuple[Path, dict[str, Any], str | None]]:
    """Read each different evaluation in a run's folder; a damaged file comes with a note.

    `acmoe evaluate RUN --json > RUN/evaluation.json` leaves the same document twice.
    """
    seen = []
    for path in sorted(folder.glob(EVALUATIONS)):
        try:
            document = read_json(path)
        except UserError as error:
            yield path, {}, str(error)
            continue
        document.pop("format", None)
        if document not in seen:
            seen.append(document)
            yield path, document, None


def no_report(path: Path, error: Exception) -> str:
    """Return the note about a file whose fields are not those of a report."""
    return f"{path} is no report that acmoe wrote ({error!r}); left out"


def _scores(document: dict[str, Any], source: str) -> Iterator[Score]:
    if document["split"] != "test":
        return
    step = document["step"]
    if type(step) is not int:
        raise TypeError(f"step={step!r}")
    if "test_accuracy" in document:  # a finetuned classifier wrote it
        yield Score(
            label="test accuracy (%)",
            lower=False,
            value=float(document["test_accuracy"]),
            step=step,
            statistics=NONE,
            protocol=f"{document['sentences']['test']:,} sentences; {document['splits']}",
            source=source,
        )
        return
    for figure in document["figures"]:
        images = "top1" in figure
        value = figure["top1"] if images else figure["value"]
        if figure.get("contaminated") or value is None or not is_finite(value):
            continue
        yield Score(
            label="test top-1 (%)" if images else f"test {document['metric']}",
            lower=not images,
            value=float(value),
            step=step,
            statistics=str(figure["statistics"]),
            protocol=_images(document) if images else _text(document, figure["tokens"]),
            source=source,
        )


def _text(document: dict[str, Any], tokens: int) -> str:
    return (
        f"{tokens:,} tokens of {document['corpus']}, read in {document['batch']} rows and blocks "
        f"of {document['block']}, {document['precision']}"
    )


def _images(document: dict[str, Any]) -> str:
    averaged = ", averaged weights" if document.get("ema") else ""
    return (
        f"{document['images']:,} images of {document['data']}, {document['size']} pixels a side, "
        f"in batches of {document['batch']}, expert capacity "
        f"{capacity_text(document.get('capacity'))}, {document['precision']}{averaged}"
    )


def chosen_score(scores: tuple[Score, ...], best_step: int | None) -> Score | None:
    """Return the score for the summary: of the best checkpoint, else of the latest one."""
    if not scores:
        return None
    at_best = [score for score in scores if score.step == best_step]
    return at_best[0] if at_best else max(scores, key=lambda score: score.step)


def score_command(folder: Path, kind: str, finetuned: bool, starts: tuple[Start, ...]) -> str:
    """Return the command that would measure the test score, or "" where there is none."""
    if finetuned:  # the same command finds nothing left to train, and tests
        return starts[-1].command if starts else ""
    known = kind == LANGUAGE_RUN or kind in VISION_RUNS
    return f"acmoe evaluate {folder}" if known else ""
