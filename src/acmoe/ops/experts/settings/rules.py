"""Rules for the expert GEMMs of shapes that no table names: blocks, pipelines, copies.

The tables (tables.py) hold measurements of single shapes. These rules generalise them: each limit
below lies between two shapes whose best settings differ (H200, bf16; names of lab/bench/shapes.py).
They hold for GPUs with 227 KiB of shared memory a program and TMA, H100, H200 and B200.

D features, F hidden units, W = 2F for gated experts, else F, E experts, N rows.
"""

from typing import NamedTuple

import torch

from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts.settings.gemms import (
    COLUMNS,
    WEIGHT_GEMMS,
    PipelineConfig,
    VectorBlocks,
)

# Widths W from which tokens are copied into sorted rows before the GEMMs, in forward and backward.
# A GEMM that loads both operands by TMA saves N D W * 4e-16 seconds against one that gathers (600
# TFLOP/s, 12%). The copy takes a little over N D * 5e-13 seconds (4 TB/s). Both are equal at W =
# 1250. In backward a copy also allows the kernel that fuses the activation's gradient: it paid at W
# = 1536 and 2048, made no difference at 1024 (qwen3next: 3.17 against 3.18 ms; without the Hopper
# kernels it pays), and did not pay at 512 (fine). In forward gathering costs less: 1.71 against
# 1.77 ms with a copy at W = 2816 (dsv2lite), 3.28 against 3.26 at 5760 (gptoss).
COPY_WIDTH, COPY_WIDTH_BACKWARD = 4096, 1024
# From this width the copy of x also pays for up_weight alone, whose Hopper kernel can gather: 3.09
# against 3.15 ms at W = 5760 (gptoss), 2.164 against 2.162 at 3072, 3.10 against 2.99 at 2048
# (olmoe).
_COPY_FOR_UP_WEIGHT = 3328
# Rows of an average expert above which an up_weight that gathers has 3 stages instead of 4: 2.99
# against 3.03 ms at olmoe (4,096 rows), 2.27 against 2.31 at qwen30b (2,048), but 1.31 against 1.27
# at qwen3next (320).
_LONG_WEIGHT = 1024
# Inner dimensions from which Triton's tiles of 256 columns are faster than of 128: dsv2lite's down
# takes 0.80 against 0.88 ms (1408), qwen3next's 0.65 against 0.64 (512).
_WIDE_INNER = 1024
# Inner dimensions up to which, and rows of an average expert from which, the Hopper kernel by rows
# is faster than Triton's. "input": 1.50 against 1.57 ms at 2816 (dsv2lite), 3.31 against 3.44 at
# 5760 (gptoss), 4.93 against 5.14 at 12800 (phi), 4.08 against 4.16 at 16384 (scout, 1,024 rows),
# but with 128 to 512 rows 0.728 against 0.712 at 12800 (phi@2048), 0.808 against 0.751 at 16384
# (scout@2048), 2.54 against 2.45 at 32768 (mixtral22b@2048). "down": 0.378 against 0.379 at 6400
# (phi@2048), 0.391 against 0.385 at 8192 (scout@2048), 6.17 against 6.39 at 10752 (DBRX, 2,048).
_LONGEST_INNER, _LONG_INNER_ROWS = {"down": 6400, "input": 8192}, 1024
# Features from which, and rows of an average expert up to which, "hidden" is cooperative, against
# ping-pong: 1.42 against 1.48 ms at 6144 (mixtral22b@2048, 512 rows), 0.88 against 0.91 at 7168
# (dsv3@2048, 512), 2.35 against 2.38 at 5120 (scout, 1,024), but 0.497 against 0.486 at 4096
# (phi@2048, 256), and with more rows 7.47 against 7.37 at 6144 (DBRX, 2,048), 6.79 against 6.59 at
# 7168 (dsv3, 4,096).
_COOPERATIVE_DIM, _COOPERATIVE_ROWS = 4608, 1024
# Features from which, and rows of an average expert above which, "hidden" prefers buffers to
# stages: 1.99 against 2.09 ms at 2880 features (gptoss), but 1.15 against 1.11 at 2048 (dsv2lite),
# and 0.349 against 0.331 at 2880 with 256 rows (gptoss with 2,048 tokens).
_BUFFERED_DIM, _BUFFERED_ROWS = 2560, 512
# Padding of the columns that a wide tile may add before the narrow one is taken: at 6.7% (gptoss)
# the wide one takes 1.58 ms, the narrow one 1.71.
_PADDING = 0.08
# Padding of the columns of a weight gradient above which its wide tiles, and the Hopper kernel, are
# left out.
_WEIGHT_PADDING = 0.25
_FEW_TILES = 64  # a weight gradient with fewer tiles is split over rows to fill the GPU
# Rows of an average expert below which half of a tile of 128 rows would be padding.
FEW_ROWS = 64
# Blocks of the GEMMs by rows where an average expert has few rows: (up to so many rows, gated up,
# the others). There the weights are read once, and a GEMM takes as long as that. Tokens come from
# L2 with every K block, m rows for 2n or n rows of weights; L2 gives about 5.5 TB/s and the memory
# 4.2, so that tiles of 64 or 128 rows would leave 3.7 or 2.8 TB/s for the weights. 3 programs a
# multiprocessor, with 3 stages in flight each, keep 160 KB of loads in flight; 40 KB suffice.
# Measured on an H200 as CUDA graphs, experts alone: olmoe, gptoss, qwen3next and dsv2lite with 16
# tokens take 189, 377, 230 and 235 us in tiles of 16 rows; 271, 551, 329 and 332 in tiles of 64.
# With 128 tokens olmoe and dsv2lite take 216 and 284 us in tiles of 32 rows, 280 and 373 of 64;
# qwen3next with 1,024 tokens, 20 rows an expert, 810 and 1,024. "down" differs by 1 to 3% only.
FEW_BLOCKS = (
    (8, Blocks(16, 64, 128, 4, 3, True, 0, 2), Blocks(16, 128, 64, 4, 4, True, 0, 3)),
    (32, Blocks(32, 64, 128, 4, 3, True, 0, 0), Blocks(32, 128, 64, 4, 4, True, 0, 2)),
    (FEW_ROWS, Blocks(64, 64, 64, 4, 4, True, 0, 2), Blocks(64, 128, 64, 4, 4, True, 0, 2)),
)
# Rows of an average expert up to which the forward gathers tokens and "down" runs in Triton: the
# Hopper kernel has tiles of 128 rows.
FEW_ROWS_FORWARD = 32
# Rows of an average expert, more than and up to, for which "up" without a backward runs in its
# Hopper kernel. Tiles of 128 rows pad olmoe's 128 rows an expert (1,024 tokens) by half, as every
# second expert has some more; that kernel pads them by a quarter. The layer of olmoe as a CUDA
# graph on an H200, with Triton's "up" and with this one: 512 tokens 327 and 266 us, 1,024 tokens
# 353 and 329, 2,048 tokens 505 and 464, 4,096 tokens 804 and 792.
UP_PIPELINE_ROWS = (FEW_ROWS, 512)
# Where the average expert has more than the first and at most the second number of rows, the Hopper
# kernel of "up" has these rows as columns of its MMAs (hopper/columns.py). It takes 164, 166, 164,
# 168, 171, 190 and 221 us with 104, 112, 120, 128, 136, 144 and 152 rows (olmoe); up.py takes 154,
# 169, 165, 176, 192, 206 and 207. With 128 rows other layers take 6 to 13% less; phi takes 0.6%
# more, where one of 16 experts had 161 rows.
UP_COLUMNS_ROWS = (108, 148)
# "down" does the same where the rows of the average expert, rounded up to a power of two, are this
# number. With 128 rows it takes 0 to 18% less at seven layers, and 17% more at phi, where the
# expert with 161 rows has a second part; with two other draws of experts it took 4 and 17% less
# there. With 65 to 104 rows it takes 1 to 2% more. (Both: H200, a script that was not kept.)
DOWN_COLUMNS_ROWS = 128
# Both need so many inner columns, the fewest that were timed with 128 rows: with fewer, storing the
# transposed result takes a larger share. granite's "down" (512) took 7% longer with 102 rows.
_COLUMNS_INNER = {"up": 2048, "down": 768}
# A few tokens are multiplied as vectors (experts/triton/vectors.py): up to VECTOR_TOKENS, of at
# most VECTOR_CHOICES experts each, if there are at least as many experts as rows. On an H200 4
# tokens of olmoe took 127 us as vectors and 106 in tiles of 16 rows; one token took 43 with one
# stage in both kernels, 41 with three in "up", 35 with three in "down".
VECTOR_TOKENS, VECTOR_CHOICES = 1, 16
VECTORS = {"up": VectorBlocks(4, 8192, 4, 3), "down": VectorBlocks(4, 8192, 4, 3)}


class Layer(NamedTuple):
    """The sizes that decide the settings of a layer's GEMMs."""

    dim: int  # D
    hidden: int  # F
    experts: int  # E
    width: int  # W
    rows: int  # rows of an average expert, N / E, rounded up to a power of two
    dtype: torch.dtype = torch.bfloat16  # dtype of the tokens

    @property
    def gated(self) -> bool:
        return self.width > self.hidden

    @property
    def aligned(self) -> bool:
        """Return True if rows are a multiple of 16 bytes long, as TMA needs."""
        size = self.dtype.itemsize
        return self.dim * size % 16 == 0 and self.hidden * size % 16 == 0

    def inner_outer(self, kernel: str) -> tuple[int, int]:
        """Return the reduction dimension and the columns of a GEMM by rows."""
        return {
            "up": (self.dim, self.hidden),
            "down": (self.hidden, self.dim),
            "hidden": (self.dim, self.hidden),
            "input": (self.width, self.dim),
        }[kernel]


def padding(columns: int, block: int) -> float:
    """Return the share that blocks of this many columns compute beyond the columns there are."""
    return (-columns % block) / columns


def copies(layer: Layer, *, backward: bool) -> bool:
    """Return True if tokens are copied into sorted rows before the GEMMs read them."""
    if not backward and layer.rows <= FEW_ROWS_FORWARD:
        return False  # a launch more, to save reads of a few rows from L2
    return layer.width >= (COPY_WIDTH_BACKWARD if backward else COPY_WIDTH)


def up_by_pipeline(layer: Layer) -> bool:
    """Return True if the Hopper kernel is expected to be the fastest "up" without a backward."""
    more_than, up_to = UP_PIPELINE_ROWS
    return more_than < layer.rows <= up_to


def up_by_columns(rows: float, dim: int) -> bool:
    """Return True if "up" in its Hopper kernels should have the rows as columns of its MMAs.

    rows: those of an average expert, not rounded; dim: D.
    """
    more_than, up_to = UP_COLUMNS_ROWS
    return more_than < rows <= up_to and dim >= _COLUMNS_INNER["up"]


def by_vectors(tokens: int, top_k: int, experts: int) -> bool:
    """Return True if a forward without backward runs as matrix-vector products."""
    return tokens <= VECTOR_TOKENS and top_k <= VECTOR_CHOICES and tokens * top_k <= experts


def vector_blocks(kernel: str, inner: int, parallel: int) -> tuple[int, int, int, int]:
    """Return columns, inner block, warps and stages of a matrix-vector product.

    inner: the dimension that is summed over; parallel: matrices that a program reads at once.
    """
    columns, elements, num_warps, num_stages = VECTORS[kernel]
    longest = 1 << max(inner - 1, 15).bit_length()
    return columns, min(longest, elements // (columns * parallel)), num_warps, num_stages


def few_blocks(kernel: str, layer: Layer) -> Blocks:
    """Return the blocks of a GEMM by rows where an average expert has at most FEW_ROWS."""
    gated = kernel == "up" and layer.gated
    return next(up if gated else other for rows, up, other in FEW_BLOCKS if layer.rows <= rows)


def blocks(kernel: str, layer: Layer, *, copied: bool) -> Blocks:
    """Return the blocks of a Triton GEMM, loaded by TMA.

    copied: the backward reads copied rows.
    """
    if kernel in WEIGHT_GEMMS:
        return _weight_blocks(kernel, layer, copied)
    inner, outer = layer.inner_outer(kernel)
    if layer.rows <= FEW_ROWS:
        return few_blocks(kernel, layer)
    if kernel == "up" and layer.gated:
        return Blocks(128, 128, 64, 8, 4, True, 0, 1)
    if inner < _WIDE_INNER or padding(outer, 256) > _PADDING:
        return Blocks(128, 128, 64, 4, 3, True, 0, 2)
    return Blocks(128, 256, 64, 8, 4, True, 0, 1)


def _weight_blocks(kernel: str, layer: Layer, copied: bool) -> Blocks:
    """Return the blocks of a weight gradient (O, I): the wide side where less is padding."""
    outer, inner = (
        (layer.dim, layer.hidden) if kernel == "down_weight" else (layer.width, layer.dim)
    )
    splits = 0 if -(-outer // 128) * -(-inner // 256) * layer.experts < _FEW_TILES else 1
    if min(padding(outer, 256), padding(inner, 256)) > _WEIGHT_PADDING:
        return Blocks(128, 128, 64, 8, 3, True, splits)
    if not copied:  # the gathered operand, which passes through registers, is the narrow side
        sides = (128, 256) if kernel == "down_weight" else (256, 128)
        return Blocks(*sides, 64, 8, 3, True, splits)
    sides = (128, 256) if padding(inner, 256) <= padding(outer, 256) else (256, 128)
    return Blocks(*sides, 32, 8, 4, True, splits, 1)


def pipeline(kernel: str, layer: Layer, *, copied: bool) -> PipelineConfig | None:
    """Return the settings of a Hopper GEMM, or None where Triton's is expected to be faster.

    copied: the backward reads copied rows. hopper/choice.py checks if the kernel supports the call.
    """
    if kernel == "hidden":
        # Against GEMM and activation apart: 9% less at mixtral, 21% at qwen30b, 25% at olmoe.
        wide = layer.dim >= _COOPERATIVE_DIM and padding(layer.hidden, 256) <= _PADDING
        if wide and FEW_ROWS < layer.rows <= _COOPERATIVE_ROWS:
            return PipelineConfig("cooperative", 3, 2)
        buffered = layer.dim >= _BUFFERED_DIM and layer.rows > _BUFFERED_ROWS
        return PipelineConfig("ping-pong", *((4, 4) if buffered else (5, 2)))
    if kernel in WEIGHT_GEMMS:
        gathers = not copied or (kernel == "up_weight" and layer.width < _COPY_FOR_UP_WEIGHT)
        if max(padding(layer.dim, 128), padding(layer.hidden, 128)) > _WEIGHT_PADDING:
            return None
        long = gathers and kernel == "up_weight" and layer.rows > _LONG_WEIGHT
        return PipelineConfig("cooperative", 3 if long else 4, gathers=gathers)
    inner, outer = layer.inner_outer(kernel)
    narrow = padding(outer, 256) > _PADDING
    long = inner >= _COLUMNS_INNER["down"]
    if kernel == "down" and layer.rows == DOWN_COLUMNS_ROWS and long and not narrow:
        return COLUMNS
    if inner > _LONGEST_INNER[kernel] and layer.rows < _LONG_INNER_ROWS:
        return None
    if kernel == "down" and layer.rows <= FEW_ROWS_FORWARD:
        return None
    if narrow:
        return PipelineConfig("ping-pong", 6)
    return PipelineConfig("cooperative", 4)
