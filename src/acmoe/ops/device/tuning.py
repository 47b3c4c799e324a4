"""Block sizes and pipeline settings of the expert GEMMs: tables of measurements, and rules.

The six grouped GEMMs of a layer are named
    up            h = x @ up^T                 (N, W)
    down          y = a @ down^T               (N, D)
    hidden        da = grad @ down             (N, F)
    down_weight   grad^T a                     (E, D, F)
    up_weight     dh^T x                       (E, W, D)
    input         dx = dh @ up                 (N, D)
for N rows sorted by expert, D features, F hidden units, W = 2F for swiglu, else F, E experts.

The keys of the JSON table are "NAME/D/F/E". There are three kinds of rows:
    "up/..."             `Blocks` of the Triton kernel: [m, n, k, num_warps, num_stages, tma,
                         splits, persistent], the last three optional
    "pipeline_down/..."  `PipelineConfig` of the Hopper kernel, a GEMM with a multistage TMA
                         pipeline: [form, stages, buffers, lead, gathers], the last three optional;
                         null where that kernel was not faster. The form is the schedule of the two
                         consumer warpgroups: "ping-pong", each computes tiles of its own, or
                         "cooperative", each computes half of every tile. ["torch", 0] is torch's
                         grouped GEMM.
    "copy/..."           [forward, backward]: true where tokens are copied into sorted rows before
                         the GEMMs instead of being gathered by them

The first of these that has a row decides: the user's own table (ACMOE_TUNED), what this machine
measured at first use (MEASURED, filled by ops/experts/tune/first_use.py), the package's table, and
the rules (rules.py) for all other shapes.
"""

import functools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from acmoe.errors import UserError
from acmoe.ops.device import rules
from acmoe.ops.device.rules import Layer
from acmoe.ops.device.settings import (
    GEMMS,
    GROUPED_MM,
    ROW_GEMMS,
    WEIGHT_GEMMS,
    Blocks,
    PipelineConfig,
)

TABLE = Path(__file__).with_name("tuned.json")


Table = dict[str, list[Any] | None]


@functools.cache
def _table() -> Table:
    """Return the package's table.

    `acmoe bench tune` found its blocks on an H200. Its rows of pipelines and copies were found by
    hand there, in whole layers.
    """
    return read_table(TABLE)


@functools.cache
def user_table() -> Table:
    """Return the rows of the file that ACMOE_TUNED names; none if it is not set."""
    path = os.environ.get("ACMOE_TUNED")
    if path and not Path(path).exists():
        raise UserError(
            f"ACMOE_TUNED={path} does not exist; `acmoe bench tune --table {path}` writes it"
        )
    return read_table(Path(path)) if path else {}


def clear_cache() -> None:
    """Clear the caches, so that the tables are read again."""
    _table.cache_clear()
    user_table.cache_clear()


def read_table(path: Path) -> Table:
    """Return the checked rows of a table; none if the file does not exist."""
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as a table of block sizes ({error}); let `acmoe bench tune` "
            "write one"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no table of block sizes; let `acmoe bench tune` write one")
    found = _renamed(found, path)
    for name, row in found.items():
        if not is_row(name, row):
            raise UserError(f"{path}: {name!r} cannot be {json.dumps(row)}; tune it again")
    return found


_FORMS_BEFORE = {"turns": "ping-pong", "together": "cooperative"}


def _renamed(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the rows of a table with the names of version 0.1 replaced."""
    if not any(name.startswith("ring_") for name in found):
        return found
    warnings.warn(
        f"{path} names pipelines as version 0.1 did (ring_down, turns, together); version 0.3 will "
        "refuse it. `acmoe bench tune` writes the new names",
        FutureWarning,
        stacklevel=3,
    )
    rows = {}
    for name, row in found.items():
        if name.startswith("ring_"):
            name = name.replace("ring_", "pipeline_", 1)
            if isinstance(row, list) and row:
                row = [_FORMS_BEFORE.get(row[0], row[0]), *row[1:]]
        rows[name] = row
    return rows


def is_row(name: str, row: Any) -> bool:
    """Return True if the row has the format that the module's docstring gives for its name."""
    kernel, *sizes = name.split("/")
    if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
        return False
    gemm = kernel.removeprefix("pipeline_")
    if gemm != kernel:
        return gemm in (*ROW_GEMMS, *WEIGHT_GEMMS) and (row is None or _is_pipeline(gemm, row))
    if kernel == "copy":
        return isinstance(row, list) and len(row) == 2 and {*map(type, row)} == {bool}
    return kernel in GEMMS and _is_blocks(row)


def _is_blocks(row: Any) -> bool:
    """Return True if the row is a valid `Blocks`."""
    if not isinstance(row, list) or not 5 <= len(row) <= len(Blocks._fields):
        return False
    blocks = Blocks(*row)
    counts = (*blocks[:5], blocks.splits, blocks.persistent)
    if type(blocks.tma) is not bool or any(type(n) is not int or n < 0 for n in counts):
        return False
    return blocks.num_stages > 0 and all(n > 0 and n & (n - 1) == 0 for n in blocks[:4])


def _is_pipeline(gemm: str, row: Any) -> bool:
    """Return True if the row is a valid `PipelineConfig`; hopper/choice.py checks if it fits the
    shape."""
    if not isinstance(row, list) or not 2 <= len(row) <= len(PipelineConfig._fields):
        return False
    settings = PipelineConfig(*row)
    if settings == GROUPED_MM:
        return gemm != "hidden"
    if type(settings.gathers) is not bool or any(
        type(n) is not int or n < 0 for n in settings[1:4]
    ):
        return False
    forms = {
        "hidden": ("ping-pong",),
        "down": ("ping-pong", "cooperative"),
        "input": ("ping-pong", "cooperative"),
    }
    buffered = settings.buffers > 0 or gemm != "hidden"
    return settings.form in forms.get(gemm, ("cooperative",)) and settings.stages > 1 and buffered


@functools.cache
def has_shared_memory() -> bool:
    """Return True if a program has 227 KiB of shared memory, which the table's blocks fill.

    It has on H100, H200 and B200; other GPUs have less.
    """
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)


def key(kernel: str, dim: int, hidden: int, experts: int) -> str:
    """Return the tables' key of a GEMM and a shape."""
    return f"{kernel}/{dim}/{hidden}/{experts}"


# The candidates that the tuner is trying, by GEMM; they take precedence over the tables.
OVERRIDE: dict[str, Blocks] = {}
PIPELINE_OVERRIDE: dict[str, PipelineConfig | None] = {}
COPY_OVERRIDE: list[bool] = []  # [forward, backward], or empty
# Settings that this machine measured for a layer: rows by the kernel's name, as in the table.
MEASURED: dict[Layer, Table] = {}


def _row(kernel: str, layer: Layer) -> tuple[bool, Any]:
    """Return (True, row) if a table has this kernel, else (False, None).

    A row of the package's table counts only where it was measured: on GPUs with
    `has_shared_memory`, and not for few rows per expert. Rows of the user's table and of this
    machine always count.
    """
    name = key(kernel, layer.dim, layer.hidden, layer.experts)
    if name in user_table():
        return True, user_table()[name]
    measured = MEASURED.get(layer, {})
    if kernel in measured:
        return True, measured[kernel]
    usable = has_shared_memory() and layer.rows > rules.FEW_ROWS
    return (True, _table()[name]) if usable and name in _table() else (False, None)


def is_tuned(layer: Layer) -> bool:
    """Return True if the user's table, or the package's on its GPUs, names this layer."""
    sizes = (layer.dim, layer.hidden, layer.experts)
    names = {key(kernel, *sizes) for kernel in GEMMS}
    return bool(names & {*user_table()}) or (has_shared_memory() and bool(names & {*_table()}))


def copies_rows(layer: Layer, *, backward: bool = False) -> bool:
    """Return True if experts read copied rows instead of gathering tokens."""
    if COPY_OVERRIDE:
        return COPY_OVERRIDE[backward]
    found, row = _row("copy", layer)
    return bool(row[backward]) if found else rules.copies(layer, backward=backward)


def blocks_for(kernel: str, layer: Layer) -> Blocks:
    """Return the block sizes of a Triton GEMM: a table's, or a rule's."""
    if kernel in OVERRIDE:
        return OVERRIDE[kernel]
    wide = layer.dtype.itemsize > 2  # float32 tiles take twice the shared memory
    found, row = (False, None) if wide else _row(kernel, layer)
    if found:
        return Blocks(*row)
    if layer.dim <= 32 or layer.hidden <= 32:
        return Blocks(16, 32, 32, 4, 2)
    if wide:
        return Blocks(64, 64, 32, 4, 2)
    if not (layer.aligned and has_shared_memory()):
        if kernel in WEIGHT_GEMMS or layer.rows > rules.FEW_ROWS:
            return Blocks(128, 128, 64, 8, 3)
        # 3 stages of 64 fit into the 99 KiB of shared memory that a program has on smaller cards.
        few = rules.few_blocks(kernel, layer)
        return few._replace(k=64, num_stages=3, tma=False, persistent=0)
    return rules.blocks(kernel, layer, copied=copies_rows(layer, backward=True))


def pipeline_for(kernel: str, layer: Layer) -> PipelineConfig | None:
    """Return the settings of a Hopper GEMM, or None where Triton's is faster.

    Where a table has blocks of a GEMM and no row of its pipeline, nobody compared the two: Triton's
    runs. "hidden" is the exception, where the rule's pipeline runs.
    """
    if kernel in PIPELINE_OVERRIDE:
        return PIPELINE_OVERRIDE[kernel]
    found, row = _row(f"pipeline_{kernel}", layer)
    if found:
        return None if row is None else PipelineConfig(*row)
    if kernel != "hidden" and _row(kernel, layer)[0]:
        return None
    return rules.pipeline(kernel, layer, copied=copies_rows(layer, backward=True))
