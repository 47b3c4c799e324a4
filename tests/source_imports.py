"""The imports of every file in src/acmoe, read from the source.

One inside a function, or for type checking only, counts as well.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[1]
SOURCE = PROJECT / "src" / "acmoe"


class Import(NamedTuple):
    file: Path
    line: int
    name: str  # acmoe.ops.statistics.scale, torch.nn, ...
    deferred: bool  # inside a function
    for_types: bool  # under `if TYPE_CHECKING`
    level: int  # dots of a relative import

    @property
    def module(self) -> str:
        """The module that imports."""
        return module_of(self.file)

    @property
    def loaded(self) -> set[str]:
        """The modules of acmoe that this import loads: the one it names, and packages around it.

        Packages around the importing module are loaded already.
        """
        named = self.name if self.name in modules() else self.name.rpartition(".")[0]
        parts = named.split(".")
        around = {".".join(parts[:count]) for count in range(1, len(parts))}
        around = {each for each in around if not f"{self.module}.".startswith(f"{each}.")}
        return {named, *around} & modules()

    @property
    def package(self) -> str:
        return self.file.relative_to(SOURCE).parts[0].removesuffix(".py")

    @property
    def imported_package(self) -> str | None:
        """The package this import reads from; None for packages of others and for acmoe itself."""
        parts = self.name.split(".")
        return parts[1] if parts[0] == "acmoe" and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"{self.file.relative_to(PROJECT)}:{self.line} imports {self.name}"


def module_of(file: Path) -> str:
    """The name by which a file of src/acmoe is imported."""
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def modules() -> set[str]:
    return {module_of(file) for file in FILES}


def imports_in(file: Path) -> Iterator[Import]:
    def walk(node: ast.AST, deferred: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            deferred = True
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types = True
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, deferred, for_types, 0)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module or ''}.{alias.name}"
                yield Import(file, node.lineno, name, deferred, for_types, node.level)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # an import is a statement
                yield from walk(child, deferred, for_types)

    yield from walk(ast.parse(file.read_text()), False, False)


FILES = sorted(SOURCE.rglob("*.py"))


@functools.cache  # not at the top: every worker would read all files, and one needs them
def every_import() -> list[Import]:
    return [found for file in FILES for found in imports_in(file)]


def described(wrong: list[Import]) -> str:
    return "\n" + "\n".join(str(one) for one in wrong)
