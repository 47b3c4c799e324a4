"""Look up the settings of an expert GEMM.

The first of these that names the layer decides: the user's own table (ACMOE_TUNED), what this
machine measured at first use (MEASURED, filled by tune/first_use.py), the package's table
(tuned.json), and the rules (rules.py) for all other shapes.
"""

from typing import Any

from acmoe.ops import device_support
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts.settings import rules, tables
from acmoe.ops.experts.settings.gemms import COLUMNS, GEMMS, WEIGHT_GEMMS, PipelineConfig
from acmoe.ops.experts.settings.rules import Layer
from acmoe.ops.experts.settings.tables import Table, key

# The candidates that the tuner is trying, by GEMM; they take precedence over the tables.
OVERRIDE: dict[str, Blocks] = {}
PIPELINE_OVERRIDE: dict[str, PipelineConfig | None] = {}
COPY_OVERRIDE: list[bool] = []  # [forward, backward], or empty
# Settings that this machine measured for a layer: rows by the kernel's name, as in the table.
MEASURED: dict[Layer, Table] = {}


def _own_row(kernel: str, layer: Layer) -> tuple[bool, Any]:
    """Return (True, row) if the user's table or a measurement of this machine has this kernel."""
    name = key(kernel, layer.dim, layer.hidden, layer.experts)
    if name in tables.user_table():
        return True, tables.user_table()[name]
    measured = MEASURED.get(layer, {})
    return kernel in measured, measured.get(kernel)


def _row(kernel: str, layer: Layer) -> tuple[bool, Any]:
    """Return (True, row) if a table has this kernel, else (False, None).

    A row of the package's table counts only where it was measured: on GPUs with
    `has_large_shared_memory`, and not for few rows per expert. Rows of the user's table and of this
    machine always count.
    """
    found, row = _own_row(kernel, layer)
    if found:
        return True, row
    if device_support.has_large_shared_memory() and layer.rows > rules.FEW_ROWS:
        package = tables.package_table()
        name = key(kernel, layer.dim, layer.hidden, layer.experts)
        return name in package, package.get(name)
    return False, None


def is_tuned(layer: Layer) -> bool:
    """Return True if a table has this layer: the user's, or the package's on GPUs it holds for."""
    sizes = (layer.dim, layer.hidden, layer.experts)
    names = {key(kernel, *sizes) for kernel in GEMMS}
    package = tables.package_table() if device_support.has_large_shared_memory() else {}
    return bool(names & (tables.user_table().keys() | package.keys()))


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
    if not wide:
        found, row = _row(kernel, layer)
        if found:
            return Blocks(*row)
    if layer.dim <= 32 or layer.hidden <= 32:
        return Blocks(16, 32, 32, 4, 2)
    if wide:
        return Blocks(64, 64, 32, 4, 2)
    if not (layer.aligned and device_support.has_large_shared_memory()):
        if kernel in WEIGHT_GEMMS or layer.rows > rules.FEW_ROWS:
            return Blocks(128, 128, 64, 8, 3)
        # 3 stages of 64 fit into the 99 KiB of shared memory that a program has on smaller cards.
        few = rules.few_blocks(kernel, layer)
        return few._replace(k=64, num_stages=3, tma=False, persistent=0)
    return rules.blocks(kernel, layer, copied=copies_rows(layer, backward=True))


def pipeline_for(kernel: str, layer: Layer) -> PipelineConfig | None:
    """Return the settings of a Hopper GEMM, or None where Triton's is faster.

    If a table has blocks of a GEMM and no row of its pipeline, the two were not compared, and the
    Triton kernel runs. "hidden" is the exception: there the rule's pipeline runs. The package's
    rows were measured with many rows per expert, so that the rule's COLUMNS, for about 128 rows,
    take precedence.
    """
    if kernel in PIPELINE_OVERRIDE:
        return PIPELINE_OVERRIDE[kernel]
    rule = rules.pipeline(kernel, layer, copied=copies_rows(layer, backward=True))
    row_of = _own_row if rule == COLUMNS else _row
    found, row = row_of(f"pipeline_{kernel}", layer)
    if found:
        return None if row is None else PipelineConfig(*row)
    if kernel != "hidden" and row_of(kernel, layer)[0]:
        return None
    return rule
