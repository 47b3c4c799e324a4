"""Candidates for the settings of an expert GEMM, and a cost model that ranks them.

`acmoe bench tune` times all of them; the tuning at first use only the best few. D features, F
hidden units, W = 2F for gated experts, else F, E experts, R rows of an average expert.
"""

from collections.abc import Sequence

from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts.settings.gemms import COLUMNS, GROUPED_MM, WEIGHT_GEMMS, PipelineConfig
from acmoe.ops.experts.settings.rules import DOWN_COLUMNS_ROWS, Layer

Settings = Blocks | PipelineConfig

# (m, n, k, warps, stages) of tiles that are loaded by TMA.
LARGE = (
    *((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4)),
    *((128, 256, 32, 8, 4), (256, 128, 32, 8, 4)),
)
# Tiles that are also tried with plain loads. Their addresses take registers, so the accumulators
# are smaller.
SMALL = (
    *((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4)),
    *((128, 128, 32, 8, 4), (128, 128, 32, 4, 4), (128, 128, 128, 8, 2), (128, 64, 64, 4, 4)),
    *((64, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 256, 64, 4, 3), (64, 256, 64, 4, 4)),
)
# Tiles for experts of few rows, whose time is that of reading their weights: narrow ones, so that
# there are enough programs.
FEW = (
    *((16, 64, 128, 4, 4), (16, 128, 128, 4, 3), (32, 64, 128, 4, 4), (64, 64, 64, 4, 4)),
    *((64, 64, 128, 4, 3), (64, 32, 128, 4, 4)),
)
# Settings of the GEMM "hidden" that fit into 227 KiB.
_WIDE_HIDDEN = PipelineConfig("cooperative", 3, 2)
HIDDEN = (
    *(PipelineConfig("ping-pong", *sizes) for sizes in ((5, 2), (5, 3), (4, 4), (4, 2), (3, 4))),
    _WIDE_HIDDEN,
)
# Features from which the tuning at first use tries it: with 2,048 to 2,880 it took 2 to 17% longer.
_MAYBE_WIDE = 4096
# Stages of ping-pong and of cooperative pipelines.
PING_PONG, COOPERATIVE = (4, 5, 6), (3, 4)

# The few that the tuning at first use chooses among.
_QUICK_BLOCKS = (
    Blocks(128, 256, 64, 8, 4, True, 0, 1),
    Blocks(128, 128, 64, 8, 4, True, 0, 1),
    Blocks(128, 128, 64, 4, 3, True, 0, 2),
    Blocks(64, 128, 64, 4, 4, True, 0, 2),
)
_QUICK_WEIGHT_BLOCKS = (
    Blocks(128, 256, 32, 8, 4, True, 1, 1),
    Blocks(256, 128, 64, 8, 3, True, 1),
    Blocks(128, 256, 64, 8, 3, True, 1),
    Blocks(128, 128, 64, 8, 3, True, 1),
)
_QUICK_PIPELINES = {
    "hidden": [PipelineConfig("ping-pong", 5, 2), PipelineConfig("ping-pong", 4, 4)],
    "down": [
        PipelineConfig("ping-pong", 6),
        PipelineConfig("cooperative", 4),
        GROUPED_MM,
    ],
    "down_weight": [
        *(PipelineConfig("cooperative", 4, gathers=some) for some in (False, True)),
        PipelineConfig("cooperative", 3, gathers=True),
        GROUPED_MM,
    ],
}
_QUICK_PIPELINES |= {
    "input": _QUICK_PIPELINES["down"],
    "up_weight": _QUICK_PIPELINES["down_weight"],
}

_NUM_SMS = 132
_L2_RATE, _HBM_RATE = 10e12, 4.2e12  # bytes a second


def persistent(one: Blocks) -> Blocks:
    """Return the persistent form: a multiprocessor holds one program of 8 warps or two of 4."""
    return one._replace(persistent=8 // one.num_warps)


def quick(kernel: str, layer: Layer, *, tma: bool) -> list[Settings]:
    """Return the candidates of the tuning at first use, the one that the model prefers first.

    tma: the GPU and the rows of the layer allow TMA. "up" of gated experts holds two accumulators,
    so tiles of 256 columns are left out.
    """
    double = kernel == "up" and layer.gated
    blocks: Sequence[Blocks] = _QUICK_BLOCKS
    if kernel in WEIGHT_GEMMS:
        blocks = _QUICK_WEIGHT_BLOCKS
    if not tma:
        blocks = [Blocks(*tile) for tile in SMALL]
    found: list[Settings] = [one for one in blocks if not (double and one.n == 256)]
    if kernel == "down" and layer.rows == DOWN_COLUMNS_ROWS:
        found.append(COLUMNS)
    if kernel == "hidden" and layer.dim >= _MAYBE_WIDE:
        found.append(_WIDE_HIDDEN)
    return sorted(
        [*_QUICK_PIPELINES.get(kernel, ()), *found], key=lambda one: cost(kernel, one, layer)
    )


def cost(kernel: str, settings: Settings, layer: Layer) -> float:
    """Estimate the seconds of a GEMM: the slowest of tensor cores, L2 and memory, by whole waves.

    A pipeline skips the lower half of a tile of 128 rows where it has no rows.
    """
    pipelined = isinstance(settings, PipelineConfig)
    m, n = (128, settings.columns) if isinstance(settings, PipelineConfig) else settings[:2]
    work: float
    if kernel in WEIGHT_GEMMS:
        sides = (layer.dim, layer.hidden) if kernel == "down_weight" else (layer.width, layer.dim)
        num_tiles = layer.experts * -(-sides[0] // m) * -(-sides[1] // n)
        work, length = num_tiles * m * n * layer.rows, layer.rows
        memory = 2 * (layer.experts * sides[0] * sides[1] + layer.experts * layer.rows * sum(sides))
    else:
        length, outer = layer.inner_outer(kernel)
        if kernel == "up":
            outer, n = layer.width, n * layer.width // layer.hidden
        rows = layer.rows + (64 if pipelined else m) / 2  # half a tile of padding an expert
        num_tiles = round(layer.experts * max(1, -(-layer.rows // m)) * -(-outer // n))
        work = layer.experts * rows * -(-outer // n) * n * length
        memory = 2 * layer.experts * (length * outer + layer.rows * (length + outer))
    waves = -(-num_tiles // _NUM_SMS) * _NUM_SMS / num_tiles
    busy = max(2 * work / _rate(settings), 2 * work * (m + n) / (m * n) / _L2_RATE)
    return max(waves * busy, memory / _HBM_RATE)


def _rate(settings: Settings) -> float:
    """Return the FLOP/s that the main loop reached on an H200 where it had enough to do."""
    if isinstance(settings, PipelineConfig):
        return 700e12
    if not settings.tma:
        return 500e12
    return 660e12 if settings.m * settings.n >= 128 * 256 else 620e12
