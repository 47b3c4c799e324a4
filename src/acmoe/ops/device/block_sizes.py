"""Block sizes of Triton kernels that multiply matrices."""

from typing import NamedTuple


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
