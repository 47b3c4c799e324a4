"""Block sizes: a table of what was measured, and a rule for shapes that were not."""

import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from acmoe.errors import UserError

TABLE = Path(__file__).with_name("tuned.json")

# A product whose gathered operand was copied into rows first, so that the copy engine reads both,
# is faster, by 12% in an early form (H200, olmoe: 657 against 577 TFLOP/s). Of 2 N D W operations
# at 600 TFLOP/s that saves N D W * 4e-16 seconds; the copy writes 2 N D bytes and reads the tokens
# once, a little over N D * 5e-13 seconds at 4 TB/s. They meet at a width of W = 1250. Measured, the
# backward gains at W = 1536 and 2048 (qwen30b, olmoe) and loses at 512 (fine); a forward product
# gathers at little cost now (3.71 against 3.6 ms at olmoe) and does not earn its copy there. For
# widths that were not measured the rule is on the safe side.
COPY_WIDTH = 4096


def copies_rows(dim: int, hidden: int, experts: int, width: int, *, backward: bool = False) -> bool:
    """Whether experts of this width, W, read copied rows instead of gathering tokens."""
    measured = _table().get(key("copy", dim, hidden, experts))
    return width >= COPY_WIDTH if measured is None else bool(measured[backward])


class Blocks(NamedTuple):
    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    tma: bool = False  # tiles by the copy engine; needs rows of a multiple of 16 bytes
    splits: int = 0  # of an expert's rows in a weight gradient; 0: as many as fill the chip
    persistent: int = 0  # programs a multiprocessor, each of many tiles; 0: a program a tile


PRODUCTS = ("up", "down", "hidden", "down_weight", "up_weight", "input")
BY_ROWS, BY_WEIGHTS = ("hidden", "down", "input"), ("down_weight", "up_weight")  # by a ring
RING_HEIGHT = 128  # rows of a tile
RING_DEPTH = 64  # of a block along the inner dimension


class Ring(NamedTuple):
    """How a product by a ring of shared memory runs (ops/experts/hopper/pipeline.py)."""

    form: str  # "turns": each group of warps its own tile; "together": both halves of one
    stages: int  # blocks in the ring
    buffers: int = 0  # of h, fetched behind a product in turns
    lead: int = 0  # blocks by which the second of the groups together starts later
    gathers: bool = False  # tokens, in a weight's gradient, where that costs less than a copy

    @property
    def columns(self) -> int:
        return 256 if self.form == "together" else 128


# Less than product and activation apart took wherever that was measured: 9% less at mixtral, where
# the table has a better one, 21% at qwen30b, 25% at olmoe (H200).
_HIDDEN_RING = Ring("turns", 5, 2)


Table = dict[str, list[Any] | None]


@functools.cache
def _table() -> Table:
    """ "kernel/dim/hidden/experts" -> blocks, written by `acmoe bench tune` on an H200.

    "ring_kernel/dim/hidden/experts" -> the ring that was faster, which may gather where others read
    copied rows; null: none was. "copy/dim/hidden/experts" -> [whether rows are copied in the
    forward, in the backward], where that was measured by hand. Rows of one's own come first.
    """
    return read_table(TABLE) | own_table()


@functools.cache
def own_table() -> Table:
    """Of the file that ACMOE_TUNED names."""
    own = os.environ.get("ACMOE_TUNED")
    if own and not Path(own).exists():
        raise UserError(
            f"ACMOE_TUNED={own} does not exist; `acmoe bench tune --table {own}` writes it"
        )
    return read_table(Path(own)) if own else {}


def forget() -> None:
    """Read the tables anew."""
    _table.cache_clear()
    own_table.cache_clear()


def read_table(path: Path) -> Table:
    """The rows of a table; a file that is not there has none."""
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
    kernel, *sizes = name.split("/")
    if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
        return False
    product = kernel.removeprefix("ring_")
    if product != kernel:
        return product in (*BY_ROWS, *BY_WEIGHTS) and (row is None or _is_ring(product, row))
    if kernel == "copy":
        return isinstance(row, list) and len(row) == 2 and {*map(type, row)} == {bool}
    return kernel in PRODUCTS and _is_blocks(row)


def _is_blocks(row: Any) -> bool:
    if not isinstance(row, list) or not 5 <= len(row) <= len(Blocks._fields):
        return False
    one = Blocks(*row)
    counts = (*one[:5], one.splits, one.persistent)
    if type(one.tma) is not bool or any(type(n) is not int or n < 0 for n in counts):
        return False
    return one.num_stages > 0 and all(n > 0 and n & (n - 1) == 0 for n in one[:4])


def _is_ring(product: str, row: Any) -> bool:
    """Forms that exist; whether one fits a shape is ring_choice.py's question."""
    if not isinstance(row, list) or not 2 <= len(row) <= len(Ring._fields):
        return False
    one = Ring(*row)
    if type(one.gathers) is not bool or any(type(n) is not int or n < 0 for n in one[1:4]):
        return False
    forms = {"hidden": ("turns",), "down": ("turns", "together"), "input": ("turns", "together")}
    buffered = one.buffers > 0 or product != "hidden"
    return one.form in forms.get(product, ("together",)) and one.stages > 1 and buffered


@functools.cache
def has_room() -> bool:
    """The table's blocks fill the 227 KiB of shared memory that a multiprocessor of an H100, H200
    or B200 gives a program; others have less."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)


def key(kernel: str, dim: int, hidden: int, experts: int) -> str:
    return f"{kernel}/{dim}/{hidden}/{experts}"


# The tuner's candidate, by kernel.
OVERRIDE: dict[str, Blocks] = {}
RING_OVERRIDE: dict[str, Ring | None] = {}


def blocks_for(kernel: str, dim: int, hidden: int, experts: int, dtype: torch.dtype) -> Blocks:
    if kernel in OVERRIDE:
        return OVERRIDE[kernel]
    wide = dtype.itemsize > 2  # float32 tiles take twice the shared memory
    name = key(kernel, dim, hidden, experts)
    found = _table().get(name)
    # What somebody has measured on a card of their own is for that card.
    if found is not None and not wide and (name in own_table() or has_room()):
        return Blocks(*found)
    if dim <= 32 or hidden <= 32:
        return Blocks(16, 32, 32, 4, 2)
    if wide:
        return Blocks(64, 64, 32, 4, 2)
    return Blocks(128, 128, 64, 8, 3)


def ring_for(kernel: str, dim: int, hidden: int, experts: int) -> Ring | None:
    """None where a ring was not found faster, or not tried."""
    if kernel in RING_OVERRIDE:
        return RING_OVERRIDE[kernel]
    name, table = key(f"ring_{kernel}", dim, hidden, experts), _table()
    if name not in table:
        return _HIDDEN_RING if kernel == "hidden" else None
    found = table[name]
    return None if found is None else Ring(*found)
