"""Compute what training on many GPUs sends: gradients, experts' tokens and statistics.

Nothing is measured here. The bytes are those that `acmoe.distributed.traffic` counts on small
models (tests/distributed/test_traffic.py); times follow from the assumptions of `Machine`.

C clusters (experts), D features, T tokens.
"""

import math
from dataclasses import dataclass

from acmoe.errors import check

FLOAT = 4  # bytes
GPUS = (8, 64, 512, 2048, 10_240)


def pooled_bytes(clusters: int, dim: int) -> int:
    """Return the bytes of a layer in the all-reduce of a step: counts and sums of dispersions."""
    return clusters * (dim + 1) * FLOAT


def global_bytes(clusters: int, dim: int) -> int:
    """Return the bytes that a forward pass all-reduces: float64 sums, then deviations."""
    return clusters * (dim + 1) * 8 + clusters * dim * FLOAT


def ddp_bytes(parameters: float) -> float:
    """Return the bytes that DistributedDataParallel all-reduces in a step: float32 gradients."""
    return parameters * FLOAT


def fsdp_bytes(blocks: int, rest: int) -> dict[str, int]:
    """Return what FSDP2 sends for the parameters in blocks and those outside, float32.

    Blocks are gathered in the forward and again in the backward, the rest once.
    """
    return {
        "all_gather": (2 * blocks + rest) * FLOAT,
        "reduce_scatter": (blocks + rest) * FLOAT,
    }


def expert_bytes(tokens: int, top_k: int, dim: int, size: int) -> int:
    """Return what a layer's all-to-alls send: rows there and back, their gradients there and back.

    size: bytes of a number.
    """
    return 4 * tokens * top_k * dim * size


def boundary_bytes(tokens: int, dim: int, size: int) -> int:
    """Return what a boundary of pipeline stages sends: hidden states, and their gradient back."""
    return 2 * tokens * dim * size


def state_bytes(tokens: int, clusters: int, dim: int, *, with_scale: bool) -> int:
    """Return what the routing state adds to a boundary: int32 clusters, and M.

    A layer that holds its own running scale needs no M (`with_scale=False`).
    """
    return tokens * 4 + (clusters * dim * FLOAT if with_scale else 0)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The assumptions. A step takes the time of its tokens, and statistics come on top of it."""

    bandwidth: float = 50e9  # bytes a second of a GPU's network card: 400 Gb/s
    hop: float = 8e-6  # seconds of one hop of a reduction tree


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published model and the layout it is trained in."""

    name: str
    layers: int  # MoE layers
    experts: int
    top_k: int
    dim: int
    hidden: int  # hidden units of an expert, which has three matrices
    parameters: float
    tokens_per_second: float  # measured in training, for each GPU
    source: str  # publication that states tokens_per_second
    tokens: int  # tokens of a step, for each GPU
    micro: int = 4096  # tokens of a micro-batch
    stages: int = 1  # pipeline stages
    expert_parallel: int = 1  # processes that share the experts of a layer

    @property
    def expert_parameters(self) -> int:
        return self.layers * self.experts * 3 * self.dim * self.hidden

    @property
    def least(self) -> int:
        """The fewest GPUs of the layout."""
        return self.stages * self.expert_parallel

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.tokens / self.tokens_per_second


# 989 TFLOP/s in bf16, of which 40 % are used; 6 FLOP for each active parameter and token.
_H100 = 0.4 * 989e12 / 6
_FROM_FLOPS = "6 FLOP for each active parameter, 40 % of 989 TFLOP/s"
MODELS = (
    Model(
        name="OLMoE-1B-7B",
        **{"layers": 16, "experts": 64, "top_k": 8, "dim": 2048, "hidden": 1024},
        parameters=6.92e9,
        tokens_per_second=_H100 / 1.28e9,
        source=_FROM_FLOPS,
        tokens=16_384,
        expert_parallel=8,
    ),
    Model(
        name="Mixtral 8x7B",
        **{"layers": 32, "experts": 8, "top_k": 2, "dim": 4096, "hidden": 14_336},
        parameters=46.7e9,
        tokens_per_second=_H100 / 12.9e9,
        source=_FROM_FLOPS,
        tokens=16_384,
        expert_parallel=8,
    ),
    Model(
        name="DeepSeek-V3",
        **{"layers": 58, "experts": 256, "top_k": 8, "dim": 7168, "hidden": 2048},
        parameters=671e9,
        tokens_per_second=1e12 / (180e3 * 3600),
        source="its report: 180 K GPU hours for 1 T tokens",
        tokens=30_720,  # 15,360 sequences of 4,096 on 2,048 GPUs
        stages=16,
        expert_parallel=64,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes that leave a GPU in a step, and the share of the step that statistics take."""

    model: str
    gpus: int
    step: float  # seconds
    gradients: float
    experts: float
    pooled: float
    pooled_share: float  # share of the step if no communication overlaps with computation
    globally: float
    globally_share: float
    barriers: int  # reductions over all replicas in a step with statistics_group="global"


def row(model: Model, gpus: int, machine: Machine) -> Row:
    """Return the traffic of a model on `gpus` GPUs; the tokens of each GPU stay the same number."""
    check(
        gpus >= model.least and gpus % model.least == 0,
        f"{gpus} GPUs: {model.name} is laid out in multiples of {model.least}; give one of these",
    )
    ranks = gpus // model.stages  # processes that see tokens of their own and hold the same layers
    dense = (model.parameters - model.expert_parameters) / model.stages
    own = model.expert_parameters / model.least
    copies = ranks // model.expert_parallel
    # The first MoE layer has no clusters, so one layer less has statistics.
    layers = (model.layers - 1) / model.stages
    micro = model.tokens * model.stages / model.micro
    pooled = layers * pooled_bytes(model.experts, model.dim) * _ring(ranks)
    globally = micro * layers * global_bytes(model.experts, model.dim) * _ring(ranks)
    barriers = round(2 * micro * layers)
    away = (model.expert_parallel - 1) / model.expert_parallel
    sent = expert_bytes(model.tokens, model.top_k, model.dim, 2) * model.layers * away
    return Row(
        model=model.name,
        gpus=gpus,
        step=model.step,
        gradients=ddp_bytes(dense) * _ring(ranks) + ddp_bytes(own) * _ring(copies),
        experts=sent,
        pooled=pooled,
        pooled_share=(pooled / machine.bandwidth + _latency(ranks, machine)) / model.step,
        globally=globally,
        globally_share=(globally / machine.bandwidth + barriers * _latency(ranks, machine))
        / model.step,
        barriers=barriers,
    )


def _ring(ranks: int) -> float:
    """Return how often a ring all-reduce sends each byte."""
    return 2 * (ranks - 1) / ranks


def _latency(ranks: int, machine: Machine) -> float:
    """Return the seconds that the smallest all-reduce takes: up a binary tree, and down."""
    return 2 * math.ceil(math.log2(ranks)) * machine.hop


def table(machine: Machine, gpus: tuple[int, ...] = GPUS) -> list[str]:
    """Return the lines of a Markdown table of all models on these numbers of GPUs."""
    lines = [
        "| model | GPUs | step | gradients | experts' tokens | statistics, pooled | of the step | "
        "statistics, global | of the step | barriers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for count in gpus:
            if count < model.least:
                lines.append(f"| {model.name} | {count:,} | needs {model.least:,} |" + " |" * 7)
                continue
            found = row(model, count, machine)
            lines.append(
                f"| {model.name} | {count:,} | {found.step:.2f} s | {_size(found.gradients)} | "
                f"{_size(found.experts)} | {_size(found.pooled)} | {found.pooled_share:.4%} | "
                f"{_size(found.globally)} | {found.globally_share:.2%} | {found.barriers:,} |"
            )
    return lines


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
