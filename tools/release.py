"""Make a release: set the version, date the changelog, commit and tag. Nothing is pushed.

    make release VERSION=0.2.0
    python tools/release.py --notes 0.2.0      # print the changelog's section

The tree must be clean and CHANGELOG.md must have a section "## [0.2.0] - unreleased" with text.
"""

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(rc\d+)?")
OPEN = "unreleased"
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\] - (?P<date>.+)$", re.MULTILINE)
IN_CODE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
IN_CITATION = re.compile(r"^version: (.*)$", re.MULTILINE)
RELEASED = re.compile(r"^date-released: .*\n", re.MULTILINE)


def sections(changelog: str) -> dict[str, tuple[str, str]]:
    """Map each version of a changelog to its date and text."""
    headings = list(HEADING.finditer(changelog))
    ends = [one.start() for one in headings[1:]] + [len(changelog)]
    return {
        one["version"]: (one["date"], changelog[one.end() : end].strip())
        for one, end in zip(headings, ends, strict=True)
    }


def notes(changelog: str, version: str) -> str:
    """Return the text of a version's section; exit where there is none."""
    _, text = sections(changelog).get(version, ("", ""))
    if not text:
        raise SystemExit(f"CHANGELOG.md has no text under '## [{version}]': write what changed")
    return text


def dated(changelog: str, version: str, day: str) -> str:
    """Write the day of the release into the heading of its section."""
    notes(changelog, version)
    date, _ = sections(changelog)[version]
    if date != OPEN:
        raise SystemExit(f"CHANGELOG.md says that {version} is of {date}: choose a new version")
    return changelog.replace(f"## [{version}] - {OPEN}", f"## [{version}] - {day}", 1)


def in_code(code: str, version: str) -> str:
    """Write the version into the text of src/acmoe/__init__.py."""
    return IN_CODE.sub(f'__version__ = "{version}"', code)


def in_citation(citation: str, version: str, day: str) -> str:
    """Write the version and its day into the text of CITATION.cff."""
    lines = f"version: {version}\ndate-released: {day}"
    return IN_CITATION.sub(lines, RELEASED.sub("", citation))


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def release(version: str, root: Path = ROOT, day: str | None = None) -> None:
    """Check the tree, write the three files, commit them and tag the commit."""
    if not VERSION.fullmatch(version):
        raise SystemExit(f"VERSION={version!r} is no version: write make release VERSION=0.2.0")
    if changed := git(root, "status", "--porcelain"):
        raise SystemExit(f"the tree is not clean; commit or remove first:\n{changed}")
    if git(root, "tag", "--list", f"v{version}"):
        raise SystemExit(f"the tag v{version} is there already: choose a new version")
    day = day or f"{datetime.now(UTC):%Y-%m-%d}"
    changelog, code, citation = (
        root / name for name in ("CHANGELOG.md", "src/acmoe/__init__.py", "CITATION.cff")
    )
    new = {
        changelog: dated(changelog.read_text(), version, day),
        code: in_code(code.read_text(), version),
        citation: in_citation(citation.read_text(), version, day),
    }
    for file, text in new.items():
        file.write_text(text)
    git(root, "commit", "--all", "--message", f"[tools] Release version {version}")
    git(root, "tag", "--annotate", f"v{version}", "--message", f"acmoe {version}")
    print(f"tagged v{version}; to publish it: git push --follow-tags")


def main(arguments: list[str]) -> None:
    match arguments:
        case ["--notes", version]:
            print(notes((ROOT / "CHANGELOG.md").read_text(), version))
        case [version]:
            release(version)
        case _:
            raise SystemExit("give one version: make release VERSION=0.2.0")


if __name__ == "__main__":
    main(sys.argv[1:])
