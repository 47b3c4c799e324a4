"""Block sizes and pipeline settings of the expert GEMMs: a table of measurements, and defaults.

The six grouped GEMMs of a layer are named
    up            h = x @ up^T                 (N, W)
    down          y = a @ down^T               (N, D)
    hidden        da = grad @ down             (N, F)
    down_weight   grad^T a                     (E, D, F)
    up_weight     dh^T x                       (E, W, D)
    input         dx = dh @ up                 (N, D)
for N rows sorted by expert, D features, F hidden units, W = 2F for swiglu, else F, E experts.

The keys of the JSON table are "NAME/D/F/E". There are three kinds of rows:
    "up/..."         `Blocks` of the Triton kernel: [m, n, k, num_warps, num_stages, tma, splits,
                     persistent], the last three optional
    "ring_down/..."  `PipelineConfig` of the Hopper kernel, a GEMM with a multistage TMA pipeline:
                     [form, stages, buffers, lead, gathers], the last three optional; null where
                     that kernel was not faster. The form "turns" is a ping-pong schedule: each of
                     two consumer warpgroups computes tiles of its own. The form "together" is a
                     cooperative schedule: each computes half of every tile.
    "copy/..."       [forward, backward]: true where tokens are copied into sorted rows before the
                     GEMMs instead of being gathered by them
"""

import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from acmoe.errors import UserError

TABLE = Path(__file__).with_name("tuned.json")

# A GEMM is faster if its gathered operand is first copied into sorted rows, because TMA can then
# load both operands: by 12% in an early version (H200, olmoe: 657 against 577 TFLOP/s). For 2 N D W
# operations at 600 TFLOP/s this saves N D W * 4e-16 seconds. The copy writes 2 N D bytes and reads
# the tokens once, a little over N D * 5e-13 seconds at 4 TB/s. Both are equal at W = 1250. As
# measured, the backward gains at W = 1536 and 2048 (qwen30b, olmoe) and loses at 512 (fine);
# gathering in the forward now costs little (3.71 against 3.6 ms at olmoe), less than a copy. The
# default for widths that were not measured is conservative.
COPY_WIDTH = 4096


def copies_rows(dim: int, hidden: int, experts: int, width: int, *, backward: bool = False) -> bool:
    """Return True if experts of this width W read copied rows instead of gathering tokens."""
    measured = _table().get(key("copy", dim, hidden, experts))
    return width >= COPY_WIDTH if measured is None else bool(measured[backward])


class Blocks(NamedTuple):
    """Block sizes and launch options of a Triton GEMM kernel."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    tma: bool = False  # load tiles by TMA; needs rows of a multiple of 16 bytes
    splits: int = 0  # split-K factor of a weight gradient; 0: as many as fill the GPU
    persistent: int = 0  # programs a multiprocessor of a persistent launch; 0: one program a tile


GEMMS = ("up", "down", "hidden", "down_weight", "up_weight", "input")
# GEMMs that have a Hopper kernel with a multistage TMA pipeline: those with one output row for each
# routed row, and the weight gradients.
ROW_GEMMS, WEIGHT_GEMMS = ("hidden", "down", "input"), ("down_weight", "up_weight")
PIPELINE_BM = 128  # BM of these kernels: rows of a tile
PIPELINE_BK = 64  # BK of these kernels: the inner dimension of a pipeline stage


class PipelineConfig(NamedTuple):
    """Settings of a Hopper GEMM with a multistage TMA pipeline (ops/experts/hopper/pipeline.py)."""

    form: str  # "turns": ping-pong, one tile a consumer; "together": cooperative, half a tile each
    stages: int  # pipeline stages
    buffers: int = 0  # shared-memory buffers for panels of h in the epilogue of "hidden"
    lead: int = 0  # K blocks by which the second cooperative consumer starts later
    gathers: bool = False  # a weight gradient gathers tokens, where that costs less than a copy

    @property
    def columns(self) -> int:
        """Return BN, the columns of a tile."""
        return 256 if self.form == "together" else 128


# The default for "hidden". It took less time than GEMM and activation apart wherever that was
# measured: 9% less at mixtral, where the table has a better one, 21% at qwen30b, 25% at olmoe
# (H200).
_HIDDEN_PIPELINE = PipelineConfig("turns", 5, 2)


Table = dict[str, list[Any] | None]


@functools.cache
def _table() -> Table:
    """Return the package's table with the rows of the user's own table, which take precedence.

    `acmoe bench tune` wrote the package's on an H200, except for the "copy" rows, which were
    measured by hand.
    """
    return read_table(TABLE) | user_table()


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
        raise UserError(f"{path} cannot be read as a table of block sizes: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no table of block sizes; let `acmoe bench tune` write one")
    for name, row in found.items():
        if not _is_row(name, row):
            raise UserError(f"{path}: {name!r} cannot be {json.dumps(row)}; tune it again")
    return found


def _is_row(name: str, row: Any) -> bool:
    """Return True if the row has the format that the module's docstring gives for its name."""
    kernel, *sizes = name.split("/")
    if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
        return False
    gemm = kernel.removeprefix("ring_")
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
    if type(settings.gathers) is not bool or any(
        type(n) is not int or n < 0 for n in settings[1:4]
    ):
        return False
    forms = {"hidden": ("turns",), "down": ("turns", "together"), "input": ("turns", "together")}
    buffered = settings.buffers > 0 or gemm != "hidden"
    return settings.form in forms.get(gemm, ("together",)) and settings.stages > 1 and buffered


@functools.cache
def has_shared_memory() -> bool:
    """Return True if a program has 227 KiB of shared memory, which the table's blocks fill.

    It has on H100, H200 and B200; other GPUs have less.
    """
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)


def key(kernel: str, dim: int, hidden: int, experts: int) -> str:
    """Return the table's key of a GEMM and a shape."""
    return f"{kernel}/{dim}/{hidden}/{experts}"


# The candidates that the tuner is trying, by GEMM; they take precedence over the tables.
OVERRIDE: dict[str, Blocks] = {}
PIPELINE_OVERRIDE: dict[str, PipelineConfig | None] = {}


def blocks_for(kernel: str, dim: int, hidden: int, experts: int, dtype: torch.dtype) -> Blocks:
    """Return the block sizes of a Triton GEMM: the table's, or a default."""
    if kernel in OVERRIDE:
        return OVERRIDE[kernel]
    wide = dtype.itemsize > 2  # float32 tiles take twice the shared memory
    name = key(kernel, dim, hidden, experts)
    found = _table().get(name)
    # A row of the user's own table was measured on their GPU, so it needs no check of
    # has_shared_memory.
    if found is not None and not wide and (name in user_table() or has_shared_memory()):
        return Blocks(*found)
    if dim <= 32 or hidden <= 32:
        return Blocks(16, 32, 32, 4, 2)
    if wide:
        return Blocks(64, 64, 32, 4, 2)
    return Blocks(128, 128, 64, 8, 3)


def pipeline_for(kernel: str, dim: int, hidden: int, experts: int) -> PipelineConfig | None:
    """Return the settings of a Hopper GEMM, or None where it was not faster, or not tried."""
    if kernel in PIPELINE_OVERRIDE:
        return PIPELINE_OVERRIDE[kernel]
    name, table = key(f"ring_{kernel}", dim, hidden, experts), _table()
    if name not in table:
        return _HIDDEN_PIPELINE if kernel == "hidden" else None
    found = table[name]
    return None if found is None else PipelineConfig(*found)
