"""The packages of acmoe, and which may import which: read the table, learn the architecture.

A package is a folder of src/acmoe, or a single module beside them. Imports are read from the
source, so that one inside a function, or for type checking only, counts as well.
"""

import ast
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).parents[1]
SOURCE = PROJECT / "src" / "acmoe"

EVERYONE = {"errors", "config", "storage"}  # may be imported by every package below them
LAYERS = {"ops", "routing", "experts"}

# From the bottom to the top: a package imports only from packages above it in this table.
PACKAGES: dict[str, set[str]] = {
    "starting": set(),  # ctrl-C while a command still imports torch
    "errors": set(),  # the one exception for a user's mistakes
    "config": {"errors"},  # what can be asked: frozen dataclasses
    "storage": {"errors"},  # files that survive crashes and show damage
    "recipes": EVERYONE,  # whole experiments as configs
    "runtime": EVERYONE,  # device, precision and random seed of a run
    "ops": EVERYONE,  # tensor functions: definitions in plain PyTorch, with kernels beside them
    "routing": EVERYONE | {"ops"},  # hidden states -> who goes where
    "experts": EVERYONE | {"ops", "routing"},  # tokens + routing -> expert outputs
    "data": EVERYONE,  # bytes on disk -> batches; knows no model
    "models": EVERYONE | LAYERS,  # batches -> logits
    # One model on several processes.
    "distributed": EVERYONE | LAYERS | {"runtime"},
    # Faster ways to run a whole model, put in from outside.
    "fast": EVERYONE | LAYERS | {"models"},
    "adapters": EVERYONE | LAYERS | {"models"},  # other people's models
    # inputs -> inputs that fool a model; any model that has logits
    "attacks": EVERYONE | LAYERS | {"runtime"},
    # a run -> a report
    "evaluate": EVERYONE | LAYERS | {"runtime", "data", "models", "distributed", "attacks", "fast"},
    # config -> trained model, measured as it goes
    "train": EVERYONE
    | LAYERS
    | {"runtime", "recipes", "data", "models", "distributed", "fast", "evaluate"},
    # HuggingFace transformers: its MoE models, and the library's own models and runs there
    "hf": EVERYONE | LAYERS | {"data", "models", "evaluate", "train"},
    # runs and other people's models -> figures
    "analyze": EVERYONE | LAYERS | {"runtime", "data", "models", "evaluate", "hf"},
    # runs -> one HTML page
    "report": EVERYONE | LAYERS | {"runtime", "data", "models", "evaluate", "train", "analyze"},
    # Benchmarks, studies and checks of the theory. Only the command line imports it.
    "lab": EVERYONE
    | LAYERS
    | {"runtime", "recipes", "data", "models", "fast", "hf", "evaluate", "train", "analyze"},
    # `import acmoe`: re-exports, and nothing that a command alone needs.
    "__init__": EVERYONE | LAYERS | {"starting", "data", "models", "fast", "adapters", "hf"},
    "cli": EVERYONE
    | LAYERS
    | {"runtime", "recipes", "data", "models", "fast", "adapters", "hf", "attacks"}
    | {"distributed", "evaluate", "train", "analyze", "report", "lab", "starting"},
    "__main__": {"cli"},  # python -m acmoe
}

# Packages of others, and the packages of acmoe that may import them.
AT_HOME: dict[str, set[str]] = {
    "triton": {"ops"},
    "transformers": {"adapters", "hf", "lab"},
    "timm": {"adapters"},
    "torchtitan": {"adapters"},
    "matplotlib": {"analyze", "lab"},
    "tyro": {"cli"},
    # Baselines, measured where a user has installed them; one is also a backend of the experts.
    "sonicmoe": {"ops", "lab"},
    "scattermoe": {"lab"},
    "liger_kernel": {"lab"},
    # ops: the group of a dispersion; storage: checkpoints that several processes write
    "torch.distributed": {"ops", "distributed", "storage"},
}
# config and errors are read before anything is installed, and recipes are configs.
STANDARD_LIBRARY_ONLY = {"starting", "errors", "config", "recipes"}
NEVER_INSTALLED_FOR_YOU = {"sonicmoe", "scattermoe", "liger_kernel", "timm"}
# In extras of pyproject.toml: imported inside functions, where their absence can be explained.
# An adapter without its package has nothing to do, so it may import that one at the top.
OPTIONAL = {"matplotlib", "sklearn", "PIL", "kornia", "datasets", "tensorboard", "transformers"}
OPTIONAL |= {"torchtitan", "ray"}
OPTIONAL |= NEVER_INSTALLED_FOR_YOU
# Distribution names that are not the names one imports.
IMPORTED_AS = {"pillow": "PIL", "scikit-learn": "sklearn"}
COMES_WITH = {
    "triton": "torch",
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


class Import(NamedTuple):
    file: Path
    line: int
    name: str  # acmoe.ops.statistics.scale, torch.nn, ...
    deferred: bool  # inside a function
    for_types: bool  # under `if TYPE_CHECKING`
    level: int  # dots of a relative import

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


def test_every_package_is_in_the_table() -> None:
    packages = {file.relative_to(SOURCE).parts[0].removesuffix(".py") for file in FILES}
    assert packages <= set(PACKAGES), (
        f"add {sorted(packages - set(PACKAGES))} to PACKAGES, with what it may read"
    )


def test_the_table_has_no_cycle() -> None:
    names = list(PACKAGES)
    for place, (package, reads) in enumerate(PACKAGES.items()):
        assert reads <= set(names[:place]), f"{package} reads a package that is below it"


def test_packages_import_only_what_the_table_allows() -> None:
    wrong = [
        one
        for one in every_import()
        if one.imported_package is not None
        and one.imported_package in PACKAGES
        and one.imported_package != one.package
        and one.imported_package not in PACKAGES.get(one.package, set())
    ]
    assert not wrong, described(wrong)


def test_inside_the_library_acmoe_itself_gives_its_version_only() -> None:
    # Importing what __init__.py re-exports, from inside, would go in circles.
    packages = set(PACKAGES)
    for one in every_import():
        if one.name == "acmoe":
            used = {
                node.attr
                for node in ast.walk(ast.parse(one.file.read_text()))
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "acmoe"
            }
            assert used == {"__version__"}, f"{one} for {sorted(used)}"
        if one.name.startswith("acmoe."):
            known = one.imported_package in packages or one.name == "acmoe.__version__"
            assert known, f"{one} through acmoe itself; import it from its package"


def test_imports_are_absolute() -> None:
    wrong = [one for one in every_import() if one.level > 0]
    assert not wrong, described(wrong)


def test_no_package_or_module_has_a_name_that_says_nothing() -> None:
    names = {part for file in FILES for part in file.relative_to(SOURCE).with_suffix("").parts}
    assert not names & VAGUE_NAMES, (
        f"{sorted(names & VAGUE_NAMES)} says nothing about what is inside"
    )


@pytest.mark.parametrize("package", AT_HOME)
def test_packages_stay_where_they_are_at_home(package: str) -> None:
    wrong = [
        one
        for one in every_import()
        if f"{one.name}.".startswith(f"{package}.") and one.package not in AT_HOME[package]
    ]
    assert not wrong, described(wrong)


# Words that name a kernel or a fast path. The mathematics does not know them.
BACKENDS = re.compile(r"\b(triton|gluon|grouped_mm|sonicmoe|hopper|backend)\b", re.IGNORECASE)
MATHEMATICS = ("routing", "experts", "models")


@pytest.mark.parametrize("package", MATHEMATICS)
def test_the_mathematics_names_no_backend(package: str) -> None:
    wrong = [
        f"{file.relative_to(PROJECT)}:{number}: {line.strip()}"
        for file in sorted((SOURCE / package).rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if BACKENDS.search(line) and "torch.compile" not in line
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_are_reached_through_their_op_alone() -> None:
    """Folders triton/, hopper/ and device/ are imported by the ops, and by the laboratory that
    measures and tunes them."""
    kernel = re.compile(r"acmoe\.ops\.(\w+\.(triton|hopper)|device)\b")
    wrong = [
        one
        for one in every_import()
        if kernel.match(one.name) and one.package not in {"ops", "lab"}
    ]
    assert not wrong, described(wrong)


def test_only_kernels_import_triton() -> None:
    kernel = {"triton", "hopper", "device"}
    wrong = [
        one
        for one in every_import()
        if one.name.split(".")[0] == "triton" and not kernel & set(one.file.parts)
    ]
    assert not wrong, described(wrong)


def test_modules_beside_the_kernels_load_triton_inside_functions_alone() -> None:
    """Nor do they load a kernel, which would be defined as the environment says at that moment."""
    at_import: dict[str, set[str]] = {}
    for one in every_import():
        if not (one.deferred or one.for_types):
            module = ".".join(("acmoe", *one.file.relative_to(SOURCE).with_suffix("").parts))
            at_import.setdefault(module, set()).update((one.name, one.name.rpartition(".")[0]))

    @functools.cache
    def loads_triton(module: str) -> bool:
        read = at_import.get(module, set())
        return any(name.split(".")[0] == "triton" for name in read) or any(
            loads_triton(name) for name in read if name in at_import and name != module
        )

    kernels = {"triton", "hopper", "device"}
    wrong = [
        name for name in at_import if not kernels & set(name.split(".")) and loads_triton(name)
    ]
    assert not wrong, f"import kernels inside functions, or move these to their folder: {wrong}"


def test_nothing_but_the_command_line_imports_the_laboratory() -> None:
    wrong = [
        one
        for one in every_import()
        if one.imported_package == "lab" and one.package not in {"lab", "cli"}
    ]
    assert not wrong, described(wrong)


def outside(one: Import) -> str | None:
    """The third-party package this import names, if any."""
    top = one.name.split(".")[0]
    own = top == "acmoe" or top in sys.stdlib_module_names or one.level > 0
    return None if own or (one.for_types and top == "_typeshed") else top


def test_config_errors_and_recipes_need_the_standard_library_only() -> None:
    wrong = [one for one in every_import() if one.package in STANDARD_LIBRARY_ONLY and outside(one)]
    assert not wrong, described(wrong)


def test_optional_packages_are_imported_where_their_absence_can_be_explained() -> None:
    wrong = [
        one
        for one in every_import()
        if outside(one) in OPTIONAL
        and not (one.deferred or one.for_types)
        and one.package not in {"adapters", "hf"}
    ]
    assert not wrong, described(wrong)


USED = ("hf", "vision", "plots", "data", "titan")  # extras that the library imports


def test_every_package_used_is_declared() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in USED]
    wanted = [want for wants in (project["dependencies"], *extras) for want in wants]
    names = {re.split(r"[\[<>=~! ]", want)[0] for want in wanted}
    declared = {IMPORTED_AS.get(name, name) for name in names}
    declared |= {package for package, origin in COMES_WITH.items() if origin in declared}
    declared |= NEVER_INSTALLED_FOR_YOU
    wrong = [one for one in every_import() if (outside(one) or "torch") not in declared]
    assert not wrong, described(wrong)


IMPORT_ACMOE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import acmoe
seconds = time.perf_counter() - start
new = {name.split(".")[0] for name in set(sys.modules) - before}
packages = {name.split(".")[1] for name in sys.modules if name.startswith("acmoe.")}
print(json.dumps({"seconds": seconds, "new": sorted(new), "packages": sorted(packages)}))
"""


@pytest.fixture(scope="module")
def fresh_imports() -> list[dict[str, object]]:
    """Measure the time and the modules of `import acmoe` after `import torch` in a fresh process.

    If the first was slow, measure a second one: another process may have held the disk or the core.
    """
    command = [sys.executable, "-c", IMPORT_ACMOE]
    runs: list[dict[str, object]] = []
    while not runs or (len(runs) < 2 and float(str(runs[0]["seconds"])) >= 2.0):
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(run.stdout))
    return runs


def test_importing_the_library_adds_less_than_two_seconds(
    fresh_imports: list[dict[str, object]],
) -> None:
    assert min(float(str(run["seconds"])) for run in fresh_imports) < 2.0


def test_importing_the_library_loads_no_heavy_package(
    fresh_imports: list[dict[str, object]],
) -> None:
    loaded = fresh_imports[0]["new"]
    packages = fresh_imports[0]["packages"]
    assert isinstance(loaded, list)
    assert isinstance(packages, list)
    heavy = OPTIONAL | {"scipy", "timm", "triton", "pandas", "tyro"}
    assert not set(loaded) & heavy  # torch's own imports are not counted
    assert not set(packages) & {"cli", "train", "analyze", "lab", "hf"}
