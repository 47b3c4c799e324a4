"""Measure the time that the host takes for one eager call of a layer.

Calls are queued without waiting for the GPU, which computes behind the host. On a CPU a call
computes itself, so that its time is the whole call's.
"""

import time
from dataclasses import asdict, dataclass

import torch

from acmoe.config.routing import AdaptiveConfig, RouterConfig, SMoEConfig
from acmoe.errors import check
from acmoe.lab.bench.harness.clock import Action, interleave, timing
from acmoe.lab.bench.harness.options import BOTH, FORWARD, WARM_UP, ShapesConfig
from acmoe.lab.bench.harness.progress import Say, silent
from acmoe.lab.bench.harness.results import Report, new_report
from acmoe.lab.bench.implementations.ours import new_moe
from acmoe.lab.bench.shapes import Shape, find_shapes
from acmoe.routing.statistics.step import fold_statistics
from acmoe.runtime import pick_device

MODES: dict[str, RouterConfig] = {
    "plain": SMoEConfig(),
    "running": AdaptiveConfig(statistics="running"),
    "batch": AdaptiveConfig(statistics="batch"),
}
TRAINING = "training forward"  # gradients are recorded; FORWARD records none
# Calls between two synchronisations. The GPU's queue holds about a thousand launches, and a call
# with its backward makes up to 40.
QUEUED = 10


@dataclass(frozen=True, kw_only=True)
class HostConfig(ShapesConfig):
    """Options of `acmoe bench host`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(not self.graph, "graph=True leaves the host nothing to do; leave it out")

    @property
    def kind(self) -> str:
        return "host-forward" if self.forward else "host"


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """Microseconds of the host for one call, in one statistics mode and one part."""

    shape: str
    mode: str
    part: str
    us: float
    us_low: float  # quartiles
    us_high: float


class QueueClock:
    """Clock of the host: the mean time of QUEUED calls, which the device may still be computing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def measure(self, action: Action) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(QUEUED):
            action()
        found = 1e3 * (time.perf_counter() - start) / QUEUED
        self._wait()
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bench_host(config: HostConfig, *, command: str = "", say: Say = silent) -> Report:
    device = pick_device(config.device)
    rows: list[HostRow] = []
    for shape in find_shapes(config.shapes, device, config.tokens):
        say(f"{shape.name}: timing, {config.repeat} rounds of {QUEUED} calls")
        found = measure_shape(shape, config, device)
        say(f"{shape.name}: " + ", ".join(f"{r.mode} {r.part} {r.us:.0f} us" for r in found))
        rows += found
    return new_report(config.kind, device, command, config, [asdict(row) for row in rows])


def measure_shape(shape: Shape, config: HostConfig, device: torch.device) -> list[HostRow]:
    actions: dict[str, Action] = {}
    for mode, router in MODES.items():
        for part, action in actions_of(shape, router, config, device).items():
            actions[f"{mode}/{part}"] = action
            for _ in range(WARM_UP):
                action()
    samples = interleave(actions, rounds=config.repeat, clock=QueueClock(device))
    rows = []
    for name, found in samples.items():
        mode, _, part = name.partition("/")
        us = timing([1e3 * one for one in found])
        rows.append(
            HostRow(
                shape=shape.name, mode=mode, part=part, us=us.median, us_low=us.low, us_high=us.high
            )
        )
    return rows


def actions_of(
    shape: Shape, router: RouterConfig, config: HostConfig, device: torch.device
) -> dict[str, Action]:
    """Return the calls of a layer that is not the first: it gets the state of the one before."""
    torch.manual_seed(config.seed)
    dtype = config.torch_dtype(device)
    with torch.device(device):
        moe = new_moe(shape, router).to(dtype)
        x = torch.randn(shape.tokens, shape.dim, dtype=dtype)
    learned, weight = x.clone().requires_grad_(), torch.randn_like(x)
    with torch.no_grad():
        state = moe(x)[1]
    fold_statistics(moe)  # initialise the running averages
    parameters = list(moe.parameters())

    def set_training(training: bool) -> None:
        if moe.training != training:  # outside of most timed calls: it visits every module
            moe.train(training)

    def without_gradients() -> None:
        set_training(False)
        with torch.no_grad():
            moe(x, state)

    def training() -> None:
        set_training(True)
        moe(learned, state)

    def both() -> None:
        set_training(True)
        y, after = moe(learned, state)
        grads = [weight, torch.ones_like(after.aux_loss)]
        torch.autograd.grad([y, after.aux_loss], [learned, *parameters], grads)

    if config.forward:
        return {FORWARD: without_gradients}
    return {FORWARD: without_gradients, TRAINING: training, BOTH: both}
