"""Sphinx configuration. `make docs` (tools/build_docs.py) builds the pages into site/."""

import re
from importlib import import_module
from inspect import isclass

from sphinx.application import Sphinx

import acmoe

project = "acmoe"
author = copyright = "The acmoe authors"
release = acmoe.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = "acmoe"
html_show_copyright = False

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
mermaid_version = "11.12.0"
suppress_warnings = ["myst.header"]  # pages of studies begin some tables at a third level

default_role = "code"  # docstrings write `x` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"show-inheritance": False}


def expand_objects(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace lines of the form `::: acmoe.NAME` by autodoc's directive for that object."""
    source[0] = re.sub(r"^::: ([\w.]+)$", lambda found: directive(found[1]), source[0], flags=re.M)


def directive(path: str) -> str:
    """Return autodoc's directive, in MyST, for the function or class at a dotted path."""
    module, _, name = path.rpartition(".")
    kind = "autoclass" if isclass(getattr(import_module(module), name)) else "autofunction"
    members = "   :members:\n" if kind == "autoclass" else ""
    return f"```{{eval-rst}}\n.. {kind}:: {path}\n{members}```\n"


def align_rows(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Turn rows `argument   meaning` of a docstring, continued by indents, into a list."""
    found: list[str] = []
    inside = False
    for line in lines:
        row = re.match(r"(\w[\w.]*(?:, \w+)*) {2,}(\S.*)$", line)
        if row:
            found += ["", f"`{row[1]}`", f"    {row[2]}"]
        elif inside and line.startswith("  "):
            found.append(f"    {line.strip()}")
        else:
            found += ["", line] if inside else [line]
        inside = bool(row) or (inside and line.startswith("  "))
    lines[:] = found


def setup(app: Sphinx) -> None:
    app.connect("source-read", expand_objects)
    app.connect("autodoc-process-docstring", align_rows)
