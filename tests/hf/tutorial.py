"""The code of docs/tutorial-huggingface.md, and the same page as a notebook: run this file.

python tests/hf/tutorial.py > examples/huggingface.ipynb
"""

import json
import re
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "tutorial-huggingface.md"
NOTEBOOK = PROJECT / "examples" / "huggingface.ipynb"
PAGES = "../docs/"  # links of the page, seen from the notebook


def cells() -> list[tuple[str, str]]:
    """The page as ("markdown" or "code", text) in order; other fences are part of the text."""
    parts = re.split(
        r"^```python\n(.*?)^```\n", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    kinds = ("markdown", "code")
    return [(kinds[n % 2], part.strip("\n")) for n, part in enumerate(parts) if part.strip()]


def commands() -> list[list[str]]:
    """The arguments of the commands `acmoe ...` on the page."""
    found = re.findall(r"^acmoe (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return [line.split() for line in found]


def notebook() -> dict[str, Any]:
    """The page as a notebook of nbformat 4.5 without outputs."""
    found = []
    for number, (kind, text) in enumerate(cells()):
        if kind == "markdown":
            text = re.sub(r"\]\((?!http)", f"]({PAGES}", text)
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        found.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    print(json.dumps(notebook(), indent=1, ensure_ascii=False))
