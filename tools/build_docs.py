"""Build the documentation into site/: generate the reference, run Sphinx, check the links.

The pages are built from a copy in build/docs, because docs/studies is a link to the folder
studies, and links between pages are resolved by their real places. Every warning is an error.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import check_links
import reference

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "docs"
SITE = ROOT / "site"


def main() -> int:
    copy_pages()
    reference.write(PAGES / "reference" / "generated")
    sphinx = [sys.executable, "-m", "sphinx", "-b", "dirhtml", "-W", "--keep-going", "-q"]
    places = ["-c", ROOT / "docs", "-d", ROOT / "build" / "doctrees", PAGES, SITE]
    shutil.rmtree(SITE, ignore_errors=True)  # pages that are gone would hide dead links
    status = subprocess.call([*sphinx, *map(str, places)])
    if status:
        return status
    shutil.copytree(ROOT / "docs" / "figures", SITE / "figures")  # shown in frames, not as pages
    dead = check_links.dead_links(SITE)
    pages = len(list(SITE.rglob("*.html")))
    print("\n".join(dead) or f"site/index.html: {pages} pages, no dead link")
    return 1 if dead else 0


def copy_pages() -> None:
    """Copy docs, with links followed and times of change kept, and the guide for contributors."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("records", "conf.py"))
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    (PAGES / "contributing.md").write_text(guide.replace("](docs/", "]("))  # links from the root


if __name__ == "__main__":
    sys.exit(main())
