"""The six GEMMs of an expert layer, and the settings of their kernels other than Triton's `Blocks`.

They are named
    up            h = x @ up^T                 (N, W)
    down          y = a @ down^T               (N, D)
    hidden        da = grad @ down             (N, F)
    down_weight   grad^T a                     (E, D, F)
    up_weight     dh^T x                       (E, W, D)
    input         dx = dh @ up                 (N, D)
for N rows sorted by expert, D features, F hidden units, W = 2F for swiglu, else F, E experts.
"""

from typing import NamedTuple

GEMMS = ("up", "down", "hidden", "down_weight", "up_weight", "input")
# GEMMs that have a Hopper kernel with a multistage TMA pipeline: those with one output row for each
# routed row, and the weight gradients.
ROW_GEMMS, WEIGHT_GEMMS = ("hidden", "down", "input"), ("down_weight", "up_weight")
PIPELINE_BM = 128  # BM of these kernels: rows of a tile
PIPELINE_BK = 64  # BK of these kernels: the inner dimension of a pipeline stage


class VectorBlocks(NamedTuple):
    """Block sizes of a matrix-vector product of one token (ops/experts/triton/vectors.py)."""

    columns: int  # columns of the product that a program computes
    elements: int  # elements of the weights that a program loads at a time
    num_warps: int
    num_stages: int  # pipeline stages of the loop over these elements


class PipelineConfig(NamedTuple):
    """Settings of a Hopper GEMM with a multistage TMA pipeline (ops/experts/hopper/pipeline.py)."""

    # "ping-pong": each consumer has tiles of its own; "cooperative": each has half of every tile;
    # "columns", of "down" alone: the rows of an expert are columns of the MMAs (hopper/columns.py);
    # "torch": torch's grouped GEMM, which chooses its own settings (GROUPED_MM)
    form: str
    stages: int  # pipeline stages
    # panels of h in shared memory in the epilogue of "hidden"; if cooperative, of each consumer
    buffers: int = 0
    gathers: bool = False  # a weight gradient gathers tokens, where that costs less than a copy

    @property
    def columns(self) -> int:
        """Return BN, the columns of a tile."""
        return 256 if self.form in ("cooperative", "columns") else 128


COLUMNS = PipelineConfig("columns", 4)  # 52 KiB a stage; with 3 stages it takes 3 to 8% longer
GROUPED_MM = PipelineConfig("torch", 0)  # where torch's grouped GEMM is faster than both kernels
