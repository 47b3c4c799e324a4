"""Profile the kernels of a layer or of a training step, and list the longest first."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from acmoe.errors import check, check_choice
from acmoe.lab.bench.harness.clock import Action
from acmoe.lab.bench.harness.options import DTYPES
from acmoe.lab.bench.harness.results import Report, new_report
from acmoe.lab.bench.implementations.ours import build_moe
from acmoe.lab.bench.layers.router import RouterBenchConfig, both_passes, forward_pass
from acmoe.lab.bench.layers.router_trial import MODES, as_timed, draw_trial
from acmoe.lab.bench.models.train import VARIANTS, TrainBenchConfig, prepare
from acmoe.lab.bench.shapes import find_shapes
from acmoe.runtime import pick_device

_CALLS = 5  # number of profiled calls; the figures are per call
_LONGEST_NAME = 70  # characters; names of C++ templates are far longer


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Options of `acmoe bench profile`, which profiles layers by shape and steps by model."""

    shapes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()  # numbers of tokens to profile every layer with
    forward: bool = False  # the layer's forward without gradients, instead of both passes
    models: tuple[str, ...] = ()
    statistics: str = "plain"  # statistics of the layer's router: plain, batch, running, current
    router: str = "smoe"  # router of the trained model
    variant: str = "eager"  # way to run the training step
    batch: int | None = None  # batch of the training step
    options: tuple[str, ...] = ()  # key=value settings of the models' configs
    dtype: str = "bf16"  # dtype of the layer, or precision of the training step
    top: int = 30  # number of rows; the remaining kernels are summed up in one row
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self.statistics, tuple(MODES), "statistics")
        check_choice(self.variant, VARIANTS, "variant")
        check_choice(self.dtype, tuple(DTYPES), "dtype")
        check(self.top >= 1, f"top={self.top}; show at least one row")
        for name, unset in (("router", "smoe"), ("variant", "eager"), ("batch", None)):
            value = getattr(self, name)
            check(
                bool(self.models) or value == unset,
                f"{name}={value} is of a training step; name its models, such as switch-nano",
            )
        if self.models and not self.shapes:
            self._check_no_layer_options()

    def _check_no_layer_options(self) -> None:
        check(
            self.statistics == "plain",
            f"statistics={self.statistics} are of a layer; name its shapes, or choose the router "
            "of the models, such as router=adaptive",
        )
        check(not self.tokens, f"tokens={self.tokens} are of a layer; name its shapes")
        check(not self.forward, "forward=True is of a layer; name its shapes")


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """Sum over all launches of one kernel in one call."""

    subject: str  # the profiled layer or step
    kernel: str
    launches: float
    us: float
    share: float  # share of the device's busy time


def bench_profile(config: ProfileConfig, *, command: str = "") -> Report:
    device = pick_device(config.device)
    steps = TrainBenchConfig(
        models=config.models,
        batch=config.batch,
        options=config.options,
        precision=config.dtype if config.models else "bf16",
        device=config.device,
        seed=config.seed,
    )
    rows = [
        row
        for subject, action in _subjects(config, steps, device)
        for row in profile_action(subject, action, device, config.top)
    ]
    return new_report("profile", device, command, config, [asdict(row) for row in rows])


def _subjects(
    config: ProfileConfig, steps: TrainBenchConfig, device: torch.device
) -> Iterator[tuple[str, Action]]:
    layers = RouterBenchConfig(dtype=config.dtype, device=config.device, seed=config.seed)
    with_layers = config.shapes or not config.models  # without either option: every shape
    for shape in find_shapes(config.shapes, device, config.tokens) if with_layers else ():
        trial = as_timed(config.statistics, draw_trial(shape, layers, device))
        moe = build_moe(shape, trial.weights, MODES[config.statistics])
        passes, note = (forward_pass, ", forward") if config.forward else (both_passes, "")
        yield f"{shape.name}, {config.statistics}{note}", partial(passes, moe, trial)
    for model in config.models:
        _, action, _ = prepare(model, config.router, config.variant, steps)
        yield ", ".join((model, *config.options, config.router, config.variant)), action


def profile_action(
    subject: str, action: Action, device: torch.device, top: int
) -> list[ProfileRow]:
    """Profile an action: its kernels on a GPU, its operators on a CPU."""
    for _ in range(3):
        action()
    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    with profile(activities=kinds, acc_events=True) as found:
        for _ in range(_CALLS):
            action()
        if cuda:
            torch.cuda.synchronize()
    field = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [
        (event.key, event.count, float(getattr(event, field))) for event in found.key_averages()
    ]
    events = sorted((event for event in events if event[2] > 0), key=lambda event: -event[2])
    busy = sum(time for _, _, time in events)
    rows = [("all", sum(count for _, count, _ in events), busy), *events[:top]]
    if rest := events[top:]:
        rows.append((f"{len(rest)} more", sum(c for _, c, _ in rest), sum(t for *_, t in rest)))
    return [
        ProfileRow(
            subject=subject,
            kernel=name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "...",
            launches=count / _CALLS,
            us=time / _CALLS,
            share=time / busy,
        )
        for name, count, time in rows
    ]
