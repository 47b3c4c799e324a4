"""Measure what the adaptive router adds to the plain layer, beside the least it could add.

Results are checked with a drawn scale, and times are measured with a scale by which the adaptive
router chooses the plain router's experts, except with statistics of its own tokens.

T tokens, D features, C clusters.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch

from acmoe.errors import check, check_choice, check_distinct, typed_line
from acmoe.experts.moe import MoE
from acmoe.lab.bench.harness.added import added
from acmoe.lab.bench.harness.clock import (
    Action,
    capture,
    clock_for,
    in_mib,
    interleave,
    timing,
    timings,
    warmed_memory,
)
from acmoe.lab.bench.harness.options import BOTH, FORWARD, WARM_UP, ShapesConfig
from acmoe.lab.bench.harness.progress import Say, silent, tell_times
from acmoe.lab.bench.harness.results import Report, new_report
from acmoe.lab.bench.implementations.ours import build_moe
from acmoe.lab.bench.layers.router_trial import (
    IN_SEQUENCES,
    INFERENCE,
    MODES,
    PLAIN,
    AnyLayer,
    Trial,
    as_timed,
    check_mode,
    draw_trial,
    prior_of,
)
from acmoe.lab.bench.shapes import Shape, find_shapes
from acmoe.routing.statistics.step import fold_statistics
from acmoe.runtime import pick_device

DEFAULT_LENGTH = 512
ALONE, COPY = "plain routing alone", "copy"
_COPIED = 2**28  # size in bytes of the copy that measures the bandwidth


@dataclass(frozen=True, kw_only=True)
class RouterBenchConfig(ShapesConfig):
    """Options of `acmoe bench router`."""

    compile: bool = False
    statistics: tuple[str, ...] = ("batch", "running", "current")
    length: int | None = None  # tokens of a sequence for IN_SEQUENCES; None: DEFAULT_LENGTH

    def __post_init__(self) -> None:
        super().__post_init__()
        for one in self.statistics:
            check_choice(one, tuple(MODES)[1:], "statistics")
        check_distinct(self.statistics, "statistics")
        if self.length is not None:
            check(self.length > 0, f"length={self.length}; give a positive number of tokens")
            check(
                not set(self.statistics).isdisjoint(IN_SEQUENCES),
                f"length={self.length} is read for {' and '.join(IN_SEQUENCES)} alone; add one of "
                "them to statistics, or leave it out",
            )
        check(
            not self.forward or not set(self.statistics).isdisjoint(INFERENCE),
            f"forward measures modes that decode, {' and '.join(INFERENCE[1:])}, not "
            f"statistics={' '.join(self.statistics)}",
        )

    @property
    def kind(self) -> str:
        parts = ["router"] + ["compile"] * self.compile
        return "-".join(parts + ["forward"] * self.forward + ["graph"] * self.graph)

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the statistics modes that are measured, the plain router first."""
        chosen = (PLAIN, *self.statistics)
        return tuple(one for one in chosen if one in INFERENCE) if self.forward else chosen


@dataclass(frozen=True, kw_only=True)
class RouterRow:
    """Result of one statistics mode at one shape, and its cost beyond the plain layer."""

    shape: str
    mode: str
    part: str
    refused: str | None = None
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    added_ms: float | None = None
    added_percent: float | None = None
    added_percent_low: float | None = None  # 95% interval of the median
    added_percent_high: float | None = None
    floor_ms: float | None = None  # time of two reads of the tokens at the copy's bandwidth
    memory_mib: float | None = None
    added_memory_percent: float | None = None


class Measured(NamedTuple):
    """An action that is warmed up, and its peak memory."""

    action: Action
    memory: int | None  # bytes


def bench_router(config: RouterBenchConfig, *, command: str = "", say: Say = silent) -> Report:
    device = pick_device(config.device)
    check(
        device.type == "cuda" or not (config.graph or config.compile),
        f"graph={config.graph} and compile={config.compile} are measured on CUDA, not on "
        f"device={device}; leave both out",
    )
    if dropped := [one for one in config.statistics if one not in config.modes]:
        say(f"not measured: {', '.join(dropped)}; they depend on later tokens, and cannot decode")
    rows: list[RouterRow] = []
    for shape in find_shapes(config.shapes, device, config.tokens):
        rows += measure_shape(shape, config, device, say)
    return new_report(config.kind, device, command, config, [asdict(row) for row in rows])


def measure_shape(
    shape: Shape, config: RouterBenchConfig, device: torch.device, say: Say = silent
) -> list[RouterRow]:
    if config.compile:
        torch.compiler.reset()  # the compiled graphs of one shape do not serve the next
    trial = draw_trial(shape, config, device)
    ready: dict[tuple[str, str], Measured] = {}
    lost: list[RouterRow] = []
    part = FORWARD if config.forward else BOTH
    for mode in config.modes:
        say(f"{shape.name}: building and checking {mode}")
        try:
            ready |= prepare(mode, trial, config)
        except Exception as failure:  # the failure of one mode must not end the run
            why = typed_line(failure)
            lost.append(RouterRow(shape=shape.name, mode=mode, part=part, refused=why))
    alone = _routing_forward if config.forward else _routing
    ready[ALONE, part] = warm_up(partial(alone, build_moe(shape, trial.weights), trial), config)
    actions = {f"{mode}/{part}": found.action for (mode, part), found in ready.items()}
    actions[COPY], moved = copy_bytes(device)
    say(f"{shape.name}: timing, {config.repeat} rounds")
    samples = interleave(actions, rounds=config.repeat, clock=clock_for(device))
    tell_times(say, shape.name, timings(samples))
    floor = 2 * trial.x.nbytes * timing(samples[COPY]).median / moved
    return [*(_row(shape, key, ready, samples, floor) for key in ready), *lost]


def prepare(mode: str, trial: Trial, config: RouterBenchConfig) -> dict[tuple[str, str], Measured]:
    """Build, check and warm up the layer in this mode: to train, and in some modes to infer."""
    if mode in IN_SEQUENCES:
        trial = trial.in_sequences(config.length or DEFAULT_LENGTH)
    moe = build_moe(trial.shape, trial.weights, MODES[mode])
    layer: AnyLayer = torch.compile(moe, dynamic=False) if config.compile else moe
    check_mode(layer, mode, trial, forward=config.forward)
    fold_statistics(moe)  # initialise the running averages
    timed, ready = as_timed(mode, trial), {}
    if not config.forward:
        ready[mode, BOTH] = warm_up(partial(both_passes, layer, timed), config)
    if mode in INFERENCE:
        frozen = build_moe(trial.shape, trial.weights, MODES[mode]).eval()
        frozen.load_state_dict(moe.state_dict())
        layer = torch.compile(frozen, dynamic=False) if config.compile else frozen
        check_mode(layer, mode, trial, forward=True, prior=prior_of(frozen))
        ready[mode, FORWARD] = warm_up(partial(forward_pass, layer, timed), config)
    return ready


def warm_up(action: Action, config: RouterBenchConfig) -> Measured:
    memory = warmed_memory(action, pick_device(config.device), calls=WARM_UP)
    return Measured(capture(action) if config.graph else action, memory)


def both_passes(layer: AnyLayer, trial: Trial) -> None:
    y_TD, _ = layer(trial.x, trial.state)
    torch.autograd.grad(y_TD, [trial.x, *trial.weights.parameters], trial.cotangent)


@torch.no_grad()
def forward_pass(layer: AnyLayer, trial: Trial) -> None:
    layer(trial.x, trial.state)


def _routing(moe: MoE, trial: Trial) -> None:
    routing = moe.router(trial.x, trial.state)
    sources = [trial.x, trial.weights.embedding]
    torch.autograd.grad(routing.gate, sources, routing.gate.detach())


@torch.no_grad()
def _routing_forward(moe: MoE, trial: Trial) -> None:
    moe.router(trial.x, trial.state)


def copy_bytes(device: torch.device) -> tuple[Action, int]:
    """Return a copy that measures the bandwidth, and the number of bytes it reads and writes."""
    size = _COPIED if device.type == "cuda" else _COPIED // 64
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * size


def _row(
    shape: Shape,
    key: tuple[str, str],
    ready: dict[tuple[str, str], Measured],
    samples: dict[str, list[float]],
    floor: float,
) -> RouterRow:
    mode, part = key
    own, memory = samples[f"{mode}/{part}"], ready[key].memory
    time = timing(own)
    price = more = None
    if mode not in (PLAIN, ALONE) and (PLAIN, part) in ready:
        price = added(own, samples[f"{PLAIN}/{part}"])
        before = ready[PLAIN, part].memory
        more = 100 * (memory / before - 1) if memory and before else None
    return RouterRow(
        shape=shape.name,
        mode=mode,
        part=part,
        ms=time.median,
        ms_low=time.low,
        ms_high=time.high,
        added_ms=price and price.ms,
        added_percent=price and price.percent,
        added_percent_low=price and price.low_percent,
        added_percent_high=price and price.high_percent,
        floor_ms=floor if price and part == BOTH else None,
        memory_mib=in_mib(memory),
        added_memory_percent=more,
    )
