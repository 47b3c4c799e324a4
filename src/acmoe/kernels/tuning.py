"""Block sizes: a table of what was measured, and a rule for shapes that were not."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

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


RING_HEIGHT = 128  # rows of a tile
RING_DEPTH = 64  # of a block along the inner dimension


class Ring(NamedTuple):
    """How a product by a ring of shared memory runs (kernels/ring.py)."""

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


@functools.cache
def _table() -> dict[str, list[Any]]:
    """ "kernel/dim/hidden/experts" -> blocks, written by `acmoe bench tune` on an H200.

    "copy/dim/hidden/experts" -> [whether rows are copied in the forward, in the backward], where
    that was measured by hand; "ring_kernel/dim/hidden/experts" -> the ring that was faster, which
    may gather where others read copied rows.
    """
    path = Path(__file__).with_name("tuned.json")
    found: dict[str, list[Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


@functools.cache
def _has_room() -> bool:
    """The table's blocks fill the 227 KiB of shared memory that a multiprocessor of an H100, H200
    or B200 gives a program; others have less."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)


def key(kernel: str, dim: int, hidden: int, experts: int) -> str:
    return f"{kernel}/{dim}/{hidden}/{experts}"


OVERRIDE: dict[str, Blocks] = {}  # the tuner's candidate, by kernel


def blocks_for(kernel: str, dim: int, hidden: int, experts: int, dtype: torch.dtype) -> Blocks:
    if kernel in OVERRIDE:
        return OVERRIDE[kernel]
    wide = dtype.itemsize > 2  # float32 tiles take twice the shared memory
    found = _table().get(key(kernel, dim, hidden, experts))
    if found is not None and not wide and _has_room():
        return Blocks(*found)
    if dim <= 32 or hidden <= 32:
        return Blocks(16, 32, 32, 4, 2)
    if wide:
        return Blocks(64, 64, 32, 4, 2)
    return Blocks(128, 128, 64, 8, 3)


def ring_for(kernel: str, dim: int, hidden: int, experts: int) -> Ring | None:
    """None where a ring was not found faster, or not tried."""
    found = _table().get(key(f"ring_{kernel}", dim, hidden, experts))
    if found is not None:
        return Ring(*found)
    return _HIDDEN_RING if kernel == "hidden" else None
