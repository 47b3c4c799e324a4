"""The packages of acmoe, and which may import which: read the table, learn the architecture.

A package is a folder of src/acmoe, or a single module beside them. test_imports_of_others.py has
the rules for packages of others.
"""

import ast
import functools
import graphlib
import re

import pytest

from source_imports import FILES, PROJECT, SOURCE, described, every_import

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
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


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


def test_no_module_imports_in_a_circle() -> None:
    """Neither when it is imported nor inside its functions.

    Two kinds of import are left out. Those for types alone never run. Those of `acmoe` itself are
    for its version, which functions read after all imports (the test above).
    """
    imported: dict[str, set[str]] = {}
    for one in every_import():
        if not one.for_types:
            imported.setdefault(one.module, set()).update(one.loaded - {"acmoe"})
    circle: list[str] = []
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][::-1]  # it lists each module after one that it imports
    assert not circle, " imports ".join(circle)


def test_imports_are_absolute() -> None:
    wrong = [one for one in every_import() if one.level > 0]
    assert not wrong, described(wrong)


def test_no_package_or_module_has_a_name_that_says_nothing() -> None:
    names = {part for file in FILES for part in file.relative_to(SOURCE).with_suffix("").parts}
    assert not names & VAGUE_NAMES, (
        f"{sorted(names & VAGUE_NAMES)} says nothing about what is inside"
    )


# Words that name a kernel or a fast path. The mathematics does not know them.
BACKENDS = re.compile(
    r"\b(triton|gluon|grouped_mm|sonicmoe|hopper|native|backend)\b", re.IGNORECASE
)
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
            others = {one.name.split(".")[0]} & {"triton"}
            at_import.setdefault(one.module, set()).update(one.loaded - {"acmoe"}, others)

    @functools.cache
    def loads_triton(module: str) -> bool:
        return module == "triton" or any(map(loads_triton, at_import.get(module, ())))

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
