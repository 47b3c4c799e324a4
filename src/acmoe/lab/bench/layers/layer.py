"""Measure the MoE layer beside installed baselines: time, FLOP rate, memory and errors.

T tokens, D features.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.errors import check, typed_line
from acmoe.lab.bench.harness.clock import (
    Action,
    Timing,
    capture,
    clock_for,
    in_mib,
    interleave,
    timings,
    warmed_memory,
)
from acmoe.lab.bench.harness.options import BOTH, FORWARD, WARM_UP, ShapesConfig
from acmoe.lab.bench.harness.progress import Say, silent, tell_times
from acmoe.lab.bench.harness.results import Report, new_report
from acmoe.lab.bench.implementations.check import TOLERANCE, Errors, Reference, compare, reference
from acmoe.lab.bench.implementations.plain import route
from acmoe.lab.bench.implementations.registry import Implementation, Layer, find_implementations
from acmoe.lab.bench.implementations.weights import (
    Weights,
    draw_inputs,
    draw_tokens,
    draw_weights,
)
from acmoe.lab.bench.shapes import EVEN, Shape, find_shapes
from acmoe.runtime import pick_device

CEILING = "dense matmul"
_SLOW_TO_START = ("sonicmoe",)


@dataclass(frozen=True, kw_only=True)
class LayerConfig(ShapesConfig):
    """Options of `acmoe bench layer`."""

    rivals: tuple[str, ...] = ()  # baselines; empty: every one that is not optional
    skew: bool = False  # nearly half of the tokens choose the same expert

    @property
    def kind(self) -> str:
        """Return the kind of the report.

        A baseline that takes minutes to prepare is measured separately and has a kind of its own.
        """
        parts = ["layer"]
        parts += self.rivals if self.rivals == _SLOW_TO_START else ()
        parts += ["skew"] * self.skew + ["forward"] * self.forward + ["graph"] * self.graph
        return "-".join(parts)


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Result of one implementation at one shape. Without a time, it was absent or refused."""

    shape: str
    contestant: str  # name of the implementation
    part: str  # forward (without gradients), or forward+backward
    absent: str | None = None  # reason: a missing package, device or activation
    refused: str | None = None  # reason: a failure, or a wrong result
    ms: float | None = None
    ms_low: float | None = None  # quartiles
    ms_high: float | None = None
    tflops: float | None = None
    of_ceiling: float | None = None  # FLOP rate over that of the dense matmul in the same run
    memory_mib: float | None = None  # peak beyond weights and tokens
    forward_error: float | None = None
    gradient_error: float | None = None  # only for forward+backward
    busiest_load: float | None = None  # rows of the busiest expert over the number of tokens


class Trial(NamedTuple):
    """Inputs that all implementations of a shape share."""

    shape: Shape
    weights: Weights
    x: Tensor  # (T, D) requires a gradient, unless the forward pass alone is measured
    cotangent: Tensor  # (T, D) gradient of the output
    wanted: Reference


class Ready(NamedTuple):
    """An implementation that passed its check and is warmed up."""

    name: str
    actions: dict[str, Action]  # by part
    errors: dict[str, Errors]  # by part
    memory: dict[str, int | None]  # by part, in bytes


def bench_layer(
    config: LayerConfig,
    *,
    implementations: Sequence[Implementation] = (),
    command: str = "",
    say: Say = silent,
) -> Report:
    """Measure every shape. `implementations` replaces the ones that `config.rivals` names."""
    device = pick_device(config.device)
    check(
        not config.graph or device.type == "cuda",
        f"graph=True captures CUDA graphs; device={device} has none: leave it out",
    )
    implementations = implementations or find_implementations(config.rivals)
    rows: list[LayerRow] = []
    for shape in find_shapes(config.shapes, device, config.tokens):
        rows += measure_shape(shape, implementations, config, device, say)
    return new_report(config.kind, device, command, config, [asdict(row) for row in rows])


def measure_shape(
    shape: Shape,
    implementations: Sequence[Implementation],
    config: LayerConfig,
    device: torch.device,
    say: Say = silent,
) -> list[LayerRow]:
    if device.type == "cuda":
        torch.compiler.reset()  # the compiled graphs of one shape do not serve the next
    trial = draw_trial(shape, config, device)
    ready: list[Ready] = []
    rows: list[LayerRow] = []
    for implementation in implementations:
        say(f"{shape.name}: building and checking {implementation.name}")
        found = prepare(implementation, trial, forward=config.forward, graph=config.graph)
        if isinstance(found, LayerRow):
            rows.append(found)
        else:
            ready.append(found)
    actions: dict[str, Action] = {CEILING: dense_matmul(trial)}
    for one in ready:
        actions |= {f"{one.name}/{part}": action for part, action in one.actions.items()}
    say(f"{shape.name}: timing {len(ready)} layers, {config.repeat} rounds")
    times = timings(interleave(actions, rounds=config.repeat, clock=clock_for(device)))
    tell_times(say, shape.name, times)
    ceiling = dense_flops(shape) / times[CEILING].median
    load = busiest_load(trial)
    timed = [_row(one, part, trial, times, ceiling, load) for one in ready for part in one.actions]
    return [_ceiling_row(shape, times[CEILING]), *timed, *rows]


def draw_trial(shape: Shape, config: LayerConfig, device: torch.device) -> Trial:
    check(
        not (config.skew and shape.load == EVEN),
        f"shape {shape.name!r} has an even load; leave out +even or --skew",
    )
    generator = torch.Generator(device).manual_seed(config.seed)
    dtype = config.torch_dtype(device)
    weights = draw_weights(shape, generator=generator, dtype=dtype, skew=config.skew)
    x_TD = draw_inputs(shape, weights, generator=generator, dtype=dtype)
    cotangent_TD = draw_tokens(shape, generator=generator, dtype=dtype)
    wanted = reference(x_TD, cotangent_TD, weights, shape, forward=config.forward)
    return Trial(shape, weights, x_TD.requires_grad_(not config.forward), cotangent_TD, wanted)


def prepare(
    implementation: Implementation, trial: Trial, *, forward: bool = False, graph: bool = False
) -> Ready | LayerRow:
    """Build, check and warm up an implementation, or return a row that says why this failed."""
    last = FORWARD if forward else BOTH
    without_time = partial(
        LayerRow, shape=trial.shape.name, contestant=implementation.name, part=last
    )
    reason = implementation.unsupported(trial.shape, trial.x)
    if reason is not None:
        return without_time(absent=reason)
    try:
        layer = implementation.build(trial.shape, trial.weights)
        errors = check_layer(layer, trial, forward=forward)
        return warm_up(implementation.name, layer, trial, errors, graph=graph)
    except Exception as failure:  # the failure of one baseline must not end the run
        return without_time(refused=typed_line(failure))


def check_layer(layer: Layer, trial: Trial, *, forward: bool = False) -> dict[str, Errors]:
    """Return the errors of each timed part; raise WrongResultError if one is too large.

    A layer may run other kernels without gradients, so that both calls are checked.
    """
    found: dict[str, Errors] = {}
    if not forward:
        y_TD = layer(trial.x)
        (grad_TD,) = torch.autograd.grad(y_TD, trial.x, trial.cotangent)
        found[BOTH] = compare(y_TD, grad_TD, trial.wanted)
    with torch.no_grad():
        found[FORWARD] = compare(layer(trial.x.detach()), None, trial.wanted)
    for errors in found.values():
        errors.require(TOLERANCE[trial.x.dtype])
    return found


def warm_up(
    name: str, layer: Layer, trial: Trial, errors: dict[str, Errors], *, graph: bool
) -> Ready:
    """Return the actions of the checked parts, after some calls of each."""
    actions: dict[str, Action] = {FORWARD: partial(_forward, layer, trial.x.detach())}
    if BOTH in errors:
        actions[BOTH] = partial(_both, layer, trial)
    memory: dict[str, int | None] = {}
    for part, action in actions.items():
        memory[part] = warmed_memory(action, trial.x.device, calls=WARM_UP)
    if graph:
        actions = {part: capture(action) for part, action in actions.items()}
    return Ready(name, actions, errors, memory)


@torch.no_grad()
def _forward(layer: Layer, x_TD: Tensor) -> None:
    layer(x_TD)


def _both(layer: Layer, trial: Trial) -> None:
    y_TD = layer(trial.x)
    torch.autograd.grad(y_TD, [trial.x, *trial.weights.parameters], trial.cotangent)


def dense_matmul(trial: Trial) -> Action:
    """Return the experts' first GEMM as if all rows went to one expert.

    No implementation can exceed its FLOP rate by much.
    """
    x_ND = trial.x.detach().repeat(trial.shape.top_k, 1)
    weight_DW = trial.weights.up.detach()[0].T
    return lambda: x_ND @ weight_DW


def dense_flops(shape: Shape) -> int:
    return 2 * shape.rows * shape.dim * shape.width


@torch.no_grad()
def busiest_load(trial: Trial) -> float:
    expert_ids_TK, _ = route(trial.x, trial.weights.embedding, trial.shape.top_k)
    load_E = expert_ids_TK.flatten().bincount(minlength=trial.shape.num_experts)
    return float(load_E.max()) / trial.shape.tokens


def _ceiling_row(shape: Shape, time: Timing) -> LayerRow:
    return LayerRow(
        shape=shape.name,
        contestant=CEILING,
        part="one product",
        ms=time.median,
        ms_low=time.low,
        ms_high=time.high,
        tflops=dense_flops(shape) / time.median / 1e9,
        of_ceiling=1.0,
    )


def _row(
    one: Ready, part: str, trial: Trial, times: dict[str, Timing], ceiling: float, load: float
) -> LayerRow:
    time = times[f"{one.name}/{part}"]
    rate = trial.shape.flops(backward=part == BOTH) / time.median
    memory = one.memory[part]
    return LayerRow(
        shape=trial.shape.name,
        contestant=one.name,
        part=part,
        ms=time.median,
        ms_low=time.low,
        ms_high=time.high,
        tflops=rate / 1e9,
        of_ceiling=rate / ceiling,
        memory_mib=in_mib(memory),
        forward_error=one.errors[part].forward,
        gradient_error=one.errors[part].gradient,
        busiest_load=load,
    )
