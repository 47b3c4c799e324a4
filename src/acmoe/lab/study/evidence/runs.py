"""The list of all studies: question, and number of runs in the records."""

from pathlib import Path

from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.markdown import table
from acmoe.lab.study.results.records import DONE, latest, read_results


def runs_markdown(folder: Path) -> str:
    """Return the table of the studies, those of long runs first; `folder` holds the records."""
    ordered = sorted(STUDIES.values(), key=lambda study: study.declared_pairs is None)
    rows = [
        [f"[{study.name}]({study.name}.md)", study.question, _runs(folder / f"{study.name}.jsonl")]
        for study in ordered
    ]
    return table(["study", "question", "runs"], rows) + "\n"


def _runs(path: Path) -> str:
    """Return the number of finished runs in a file of records; "none yet" without one."""
    records = latest(read_results(path)) if path.is_file() else []
    number = sum(record["status"] == DONE for record in records)
    return str(number) if number else "none yet"
