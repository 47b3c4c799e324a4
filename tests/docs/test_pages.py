"""The README and the pages of docs: their Python runs, their commands are accepted, links lead on.

Blocks of one page run in order and share their names. A fence `python slow` is left out of the
default run. Code in a comment `<!-- setup ... -->` runs before the next block and is not shown.
"""

import re
import shlex
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from acmoe.cli.arguments.parse import parse
from acmoe.cli.commands import COMMANDS
from acmoe.cli.train import Train
from acmoe.config.images.train import VisionRunConfig, override_vision_run
from acmoe.config.text.train import override_run
from acmoe.recipes import recipe

ROOT = Path(__file__).parents[2]
FOLDERS = ("start", "tutorials", "howto", "reference", "understanding", "performance")
ELSEWHERE = ("huggingface.md", "tutorial-huggingface.md")  # tests/hf runs the code of these pages
PAGES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ELSEWHERE),
    *(path for name in FOLDERS for path in sorted((ROOT / "docs" / name).glob("*.md"))),
]
# Written by `make docs`.
GENERATED = [ROOT / "docs/reference/generated" / name for name in ("commands.md", "configs.md")]
FENCE = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$|^```(?P<info>\w*[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block of a page: its language with its marks, its code, and the line before it."""

    info: tuple[str, ...]
    code: str
    line: int

    @property
    def slow(self) -> bool:
        return "slow" in self.info


def blocks_of(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found, setup = [], ""
    for match in FENCE.finditer(text):
        if match["setup"] is not None:
            setup = match["setup"]
            continue
        info = tuple(match["info"].split())
        if info[:1] == (language,) or not (info or language):
            line = text.count("\n", 0, match.start("code")) - setup.count("\n")
            found.append(Block(info, setup + match["code"], line))
            setup = ""
    return found


def run(page: Path, blocks: list[Block]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile("\n" * block.line + block.code, str(page), "exec"), names)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_PYTHON = [page for page in PAGES if blocks_of(page, "python")]
WITH_SLOW = [page for page in WITH_PYTHON if any(b.slow for b in blocks_of(page, "python"))]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_the_python_of_a_page_runs(page):
    run(page, [block for block in blocks_of(page, "python") if not block.slow])


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SLOW, ids=named)
def test_the_slow_python_of_a_page_runs(page):
    run(page, blocks_of(page, "python"))


def test_no_page_has_python_that_no_test_runs():
    places = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "studies").glob("*.md")]
    known = {*PAGES, *(ROOT / "docs" / name for name in ELSEWHERE)}
    assert [named(page) for page in set(places) - known if blocks_of(page, "python")] == []


def test_a_block_that_fails_names_its_page_and_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\nx.missing\n```\n")
    with pytest.raises(AttributeError) as raised:
        run(page, blocks_of(page, "python"))
    assert (raised.traceback[-1].path, raised.traceback[-1].lineno + 1) == (page, 5)


def commands_of(page: Path) -> list[str]:
    """Return the arguments of each `acmoe` command of a page, also behind torchrun and settings."""
    blocks = [*blocks_of(page, "bash"), *blocks_of(page, "")]
    rows = "\n".join(block.code for block in blocks).replace("\\\n", " ").splitlines()
    start = re.compile(r"(?:[A-Z_]+=\S+ )*acmoe (.*)|torchrun .* -m acmoe (.*)")
    return [match[1] or match[2] for row in rows if (match := start.fullmatch(row))]


STUDIES = sorted((ROOT / "studies").glob("*.md"))


@pytest.mark.parametrize("page", [p for p in (*PAGES, *STUDIES) if commands_of(p)], ids=named)
def test_the_parser_accepts_the_commands_of_a_page(page):
    for row in commands_of(page):
        command = parse(COMMANDS, shlex.split(row, comments=True))
        if isinstance(command, Train) and command.recipe:
            config = recipe(command.recipe)
            override = override_vision_run if isinstance(config, VisionRunConfig) else override_run
            override(config, command.overrides)


def test_the_names_that_the_page_of_python_lists_can_be_imported():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    paths = [path.rpartition(".") for path in re.findall(r"^::: ([\w.]+)$", page, flags=re.M)]
    assert len(paths) > 50
    assert [name for module, _, name in paths if not hasattr(import_module(module), name)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_a_page_lead_to_files(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target]
    files = [(page.parent / target).resolve() for target in local]
    assert [path for path in files if path not in GENERATED and not path.exists()] == []


def test_the_readme_is_short_and_has_short_paragraphs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    prose = re.sub(r"^(```.*?^```|<!--.*?-->)$", "", text, flags=re.MULTILINE | re.DOTALL)
    long = [part for part in prose.split("\n\n") if part[:1] != "|" and part.count("\n") >= 5]
    assert not [part for part in long if not part.startswith("\n")]


def cells(page: str, heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table below a heading, by their first cell, without bold."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("**", "")
    table = text[text.index(f"\n{heading}\n") :].split("\n|", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.split("\n")]
    return {row[0]: row[1:] for row in rows}


def test_readme_and_overview_have_the_router_s_share_from_the_page_of_layers():
    rows = cells("docs/performance/layers.md", "## The share of adaptive clustering")
    # Such as 1.1% (0.4 to 2.4); bold where a goal is missed.
    batch = {layer: row[0].replace("**", "") for layer, row in rows.items()}
    speed = cells("README.md", "## Speed")
    for size, layer in (("OLMoE", "olmoe"), ("Mixtral", "mixtral"), ("Qwen3-Next", "qwen3next")):
        (row,) = [row for name, row in speed.items() if name.startswith(f"{size}'s size")]
        assert row[-1] == batch[layer]
    overview = cells("docs/performance.md", "## Layers")
    added = {name.split("`")[1]: row[-1] for name, row in overview.items() if "`" in name}
    measured = {layer: share.split()[0] for layer, share in batch.items() if "%" in share}
    assert {layer: share for layer, share in added.items() if share} == measured
    goals = cells("docs/performance/goals.md", "## Goals that are met").items()
    (shares,) = [
        row[1] for name, row in goals if name.startswith("the adaptive router in a [layer]")
    ]
    for layer in ("olmoe", "qwen30b", "mixtral"):
        assert f"{layer} +{batch[layer].split()[0]}" in shares


def test_the_overview_of_layers_has_the_figures_of_the_page_of_layers():
    page = (ROOT / "docs/performance/layers.md").read_text(encoding="utf-8").replace("**", "")
    for name, row in cells("docs/performance.md", "## Layers").items():
        if "`" not in name:
            continue  # the head of the table
        layer = name.split("`")[1]
        lines = [line for line in page.split("\n") if re.match(rf"\| {layer}[ ,]", line)]
        known = {cell.split()[0] for line in lines for cell in line.split("|") if cell.strip()}
        figures = [cell.split()[0] for cell in row[1:5] if cell]  # ms, and up to three ratios
        assert len(figures) >= 2 and set(figures) <= known, (layer, figures)
