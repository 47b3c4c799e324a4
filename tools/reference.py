"""Write the reference pages of the documentation: every command, and every option of every config.

`build_docs.py` calls `write` before each build. Commands are the parser's own help pages. Options
are the fields of the config dataclasses; a field's meaning is the comment above it or behind it, or
its line below `Attributes:` in the docstring of the class.
"""

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args, get_origin

# Modules whose dataclasses are documented, each with the heading of its part of the page.
CONFIG_MODULES = {
    "acmoe.config.routing": "Adaptive routers",
    "acmoe.lab.variants.config": "Variants beyond the paper",
    "acmoe.config.base_routers": "Other routers and losses",
    "acmoe.config.text.language": "Language models",
    "acmoe.config.text.train": "Training on text",
    "acmoe.config.text.evaluate": "Evaluation on text",
    "acmoe.config.text.finetune": "Finetuning",
    "acmoe.config.text.data": "Preparing text",
    "acmoe.config.images.vision": "Image classifiers",
    "acmoe.config.images.train": "Training on images",
    "acmoe.config.images.data": "Images and augmentation",
    "acmoe.config.images.attack": "Attacks",
    "acmoe.analyze.sampling": "Analysis",
}
WIDTH = 96  # columns of a help page


@dataclass(frozen=True)
class Option:
    """One field of a config."""

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class ConfigClass:
    """One dataclass, with the fields that it adds to those it inherits."""

    name: str
    bases: tuple[str, ...]
    text: str
    options: tuple[Option, ...]


def write(folder: Path) -> None:
    """Write commands.md and configs.md into the folder; leave equal files untouched."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("commands.md", commands_page()), ("configs.md", configs_page())):
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def commands_page() -> str:
    """Return the page of all commands in Markdown."""
    parts = [
        "# Commands",
        "These are the help pages that the commands print themselves (`acmoe COMMAND --help`). "
        "A command exits with 0 when it is done, and with 2 after a mistake in its arguments, a "
        "damaged file, a failed write or a diverged run, which one line explains. A stopped "
        "command exits with 128 plus the number of the signal, and any other error gives 1.",
    ]
    for command, text in help_pages():
        level = "#" * (1 + len(command))
        parts += [f"{level} acmoe {' '.join(command)}", f"```text\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def help_pages() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every command, with its subcommands behind it, and its help page."""
    from acmoe.cli.commands import COMMANDS

    for name in COMMANDS:
        text = help_page(name)
        yield (name,), text
        for inner in re.findall(r"^\W+• (\w+)", text, re.MULTILINE):
            yield (name, inner), help_page(name, inner)


def help_page(*command: str) -> str:
    """Return what `acmoe COMMAND --help` prints, without the lines about --help itself."""
    from acmoe.cli.arguments.parse import parse
    from acmoe.cli.commands import COMMANDS

    shown = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            parse(COMMANDS, [*command, "--help"])
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    rows = shown.getvalue().splitlines()
    return "\n".join(row.rstrip() for row in rows if "show this help message" not in row).strip()


def configs_page() -> str:
    """Return the page of all configs in Markdown."""
    parts = [
        "# Configs",
        "This page lists the options of every config with their defaults. `acmoe train RECIPE "
        "--keys` lists those of a recipe with its values, and `acmoe train RECIPE KEY=VALUE` "
        "changes them; `model.router.KEY` reaches into the router. A config checks its values "
        "when it is made.",
    ]
    for module, heading in CONFIG_MODULES.items():
        parts.append(f"## {heading}")
        for found in config_classes(module):
            parts.append(f"### {found.name}")
            parts.append(f"`{module}`. {found.text}")
            if found.bases:
                parts.append(f"It also has the options of {', '.join(found.bases)}.")
            if found.options:
                parts.append(table(found.options))
    return "\n\n".join(parts) + "\n"


def table(options: tuple[Option, ...]) -> str:
    """Return the options as a Markdown table."""
    rows = ["| option | values | default | meaning |", "|---|---|---|---|"]
    for one in options:
        default = f"`{one.default}`" if one.default else "required"
        cells = (f"`{one.name}`", f"`{one.kind}`", default, one.meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def config_classes(module: str) -> Iterator[ConfigClass]:
    """Yield the public config dataclasses that the module defines, in their order."""
    loaded = importlib.import_module(module)
    source = inspect.getsource(loaded)
    comments = _comments(source)
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
            continue
        if not any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
            continue
        bases = tuple(ast.unparse(base) for base in node.bases)
        yield ConfigClass(
            name=node.name,
            bases=tuple(base for base in bases if base.endswith("Config")),
            text=_prose(ast.get_docstring(node) or ""),
            options=tuple(_options(node, comments, _choices(loaded))),
        )


def _options(
    node: ast.ClassDef, comments: dict[int, tuple[str, bool]], choices: dict[str, str]
) -> Iterator[Option]:
    described = _described(ast.get_docstring(node) or "")
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        kind = ast.unparse(field.annotation)
        if kind.startswith(("ClassVar", "InitVar")):
            continue
        name = field.target.id
        default = "" if field.value is None else _default(ast.unparse(field.value))
        meaning = _comment_of(field, comments) or described.get(name, "")
        yield Option(name, _values(kind, choices), default, _sentence(meaning))


def _comments(source: str) -> dict[int, tuple[str, bool]]:
    """Return the comment of each line, and whether it has the line for itself."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            found[token.start[0]] = (token.string.lstrip("# ").rstrip(), alone)
    return found


def _comment_of(field: ast.AnnAssign, comments: dict[int, tuple[str, bool]]) -> str:
    """Return the comment lines right above a field, and the comment behind it."""
    lines: list[str] = []
    number = field.lineno - 1
    while number in comments and comments[number][1]:
        lines.insert(0, comments[number][0])
        number -= 1
    assert field.end_lineno is not None
    behind = [comments[number][0] for number in (field.end_lineno,) if number in comments]
    return " ".join(lines + behind)


def _described(docstring: str) -> dict[str, str]:
    """Return the meanings below `Attributes:` in a docstring."""
    found: dict[str, str] = {}
    name = ""
    for row in docstring.partition("Attributes:")[2].splitlines():
        start = re.match(r" {4}(\w+): (.*)", row)
        if start:
            name = start[1]
            found[name] = start[2]
        elif name:
            found[name] += " " + row.strip()
    return found


def _prose(docstring: str) -> str:
    """Return a docstring without its `Attributes:`."""
    return docstring.partition("Attributes:")[0].strip()


def _choices(module: ModuleType) -> dict[str, str]:
    """Return the names in a module that stand for a `Literal`, each with its values."""
    return {
        name: " | ".join(map(repr, get_args(value)))
        for name, value in vars(module).items()
        if get_origin(value) is Literal
    }


def _values(kind: str, choices: dict[str, str]) -> str:
    """Return a type as its values: those of a `Literal`, also of one that has a name."""
    kind = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " | "), kind)
    return re.sub(r"\w+", lambda found: choices.get(found[0], found[0]), kind)


def _default(text: str) -> str:
    made = re.fullmatch(r"field\(default_factory=(\w+)\)", text)
    return f"{made[1]}()" if made else text


def _sentence(text: str) -> str:
    """Escape characters that Markdown would read as markup or HTML, except inside code spans."""
    parts = text.strip().split("`")
    for number in range(0, len(parts), 2):
        parts[number] = parts[number].replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
    return "`".join(parts)
