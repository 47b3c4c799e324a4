"""The files that `acmoe study NAME` reads and writes: records, page and figures."""

from pathlib import Path
from typing import NamedTuple

from acmoe.errors import check

OWN = Path("runs/study")
PUBLISHED = Path("studies")  # the folder in a clone of the repository
PUBLISHED_RECORDS = PUBLISHED / "records"


class StudyFiles(NamedTuple):
    """The files of one study."""

    records: Path  # one JSON line per cell
    page: Path  # the tables are written between the study's markers
    pictures: Path  # folder of the figures


def own_files(study: str) -> StudyFiles:
    """Return the files of a user's own runs."""
    return StudyFiles(OWN / f"{study}.jsonl", OWN / f"{study}.md", OWN / "figures")


def published_files(study: str) -> StudyFiles:
    """Return the files of the repository; raise where the command runs outside a clone of it."""
    check(
        PUBLISHED_RECORDS.is_dir(),
        f"--published, but there is no folder {PUBLISHED_RECORDS} here; run the command at the "
        "root of a clone of the repository, or leave it out",
    )
    return StudyFiles(
        PUBLISHED_RECORDS / f"{study}.jsonl", PUBLISHED / f"{study}.md", PUBLISHED / "figures"
    )
