"""Tables of settings of the expert GEMMs, as JSON: the package's (tuned.json) and the user's.

The keys are "NAME/D/F/E" for a GEMM (gemms.py) of E experts with D features and F hidden units.
There are three kinds of rows:
    "up/..."             `Blocks` of the Triton kernel: [m, n, k, num_warps, num_stages, tma,
                         splits, persistent], the last three optional
    "pipeline_down/..."  `PipelineConfig` of the Hopper kernel, a GEMM with a multistage TMA
                         pipeline: [form, stages, buffers, gathers], the last two optional;
                         null where that kernel was not faster. The form is the schedule of the two
                         consumer warpgroups: "ping-pong", each computes tiles of its own, or
                         "cooperative", each computes half of every tile. "columns", for "down"
                         alone, is cooperative with an expert's rows as columns of the MMAs.
                         ["torch", 0] is torch's grouped GEMM.
    "copy/..."           [forward, backward]: true where tokens are copied into sorted rows before
                         the GEMMs instead of being gathered by them
"""

import functools
import json
import os
import warnings
from pathlib import Path
from typing import Any

from acmoe.errors import UserError
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts.settings.gemms import (
    GEMMS,
    GROUPED_MM,
    ROW_GEMMS,
    WEIGHT_GEMMS,
    PipelineConfig,
)

TABLE = Path(__file__).with_name("tuned.json")

Table = dict[str, list[Any] | None]


@functools.cache
def package_table() -> Table:
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
    package_table.cache_clear()
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
    found = {name: _without_lead(name, row) for name, row in _renamed(found, path).items()}
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


def _without_lead(name: str, row: Any) -> Any:
    """Return the row of a pipeline without the number that once stood before `gathers`.

    It made one consumer of a tile start later than the other, which no kernel does any more.
    """
    if name.startswith("pipeline_") and isinstance(row, list) and len(row) > 3:
        return row[:3] + row[4:] if type(row[3]) is int else row
    return row


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
        type(n) is not int or n < 0 for n in (settings.stages, settings.buffers)
    ):
        return False
    forms = ["cooperative", *(["ping-pong"] if gemm in ROW_GEMMS else [])]
    if gemm == "down":
        forms.append("columns")
    buffered = settings.buffers > 0 or gemm != "hidden"
    return settings.form in forms and settings.stages > 1 and buffered


def key(kernel: str, dim: int, hidden: int, experts: int) -> str:
    """Return the tables' key of a GEMM and a shape."""
    return f"{kernel}/{dim}/{hidden}/{experts}"
