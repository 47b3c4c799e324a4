"""`acmoe bench`: how fast, side by side with every rival that is installed."""

import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from acmoe.bench.results import Report


def _command(name: str, action: "Layer | Router | Train | Profile | Tune") -> str:
    """What a reader types to take the figures again."""
    words = ["acmoe", "bench", name]
    for option in fields(action):
        value = getattr(action, option.name)
        if value == option.default or option.name == "json":
            continue
        words.append(f"--{option.name}")
        if isinstance(value, tuple):
            words += value
        elif value is not True:
            words.append(str(value))
    return shlex.join(words)


def _say(text: str) -> None:
    """Progress, beside the report."""
    print(text, file=sys.stderr, flush=True)


def _show(report: "Report", *, json: bool, save: bool) -> int:
    """The report on stdout, and in a file of its own where asked."""
    from acmoe.bench import results
    from acmoe.bench.table import absences, terminal_table

    if json:
        print(report.to_json())
    else:
        Console().print(terminal_table(report))
        print(*absences(report), sep="\n")
    if save:
        print(f"wrote {results.save(report)}", file=sys.stderr)
    return 0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Forward and backward of the MoE layer with its plain router, ours and everybody's."""

    shapes: tuple[str, ...] = ()
    """olmoe, qwen30b, fine, mixtral, switch, swin; tiny, tiny-relu, which a CPU does if none is.
    Or your own: TOKENSxFEATURESxHIDDENxEXPERTSxTOP_K, with -relu or -gelu if it is not gated."""
    rivals: tuple[str, ...] = ()
    """Only these beside acmoe; `torch`, our reference, takes part only when named."""
    dtype: str = "bf16"
    """bf16, fp16 or fp32."""
    skew: bool = False
    """One expert is among the choices of nearly half of the tokens."""
    graph: bool = False
    """Time replays of a CUDA graph: what a small layer costs without its launches."""
    repeat: int = 50
    """Rounds; every contestant runs once in each."""
    device: str = "auto"
    """cuda where there is one."""
    json: bool = False
    """Print as JSON."""
    save: bool = False
    """Also write benchmarks/results/DATE-layer-DEVICE.json."""

    def run(self) -> int:
        from acmoe.bench.layer import LayerConfig, bench_layer

        config = LayerConfig(
            shapes=self.shapes,
            rivals=self.rivals,
            dtype=self.dtype,
            skew=self.skew,
            graph=self.graph,
            repeat=self.repeat,
            device=self.device,
        )
        return _show(
            bench_layer(config, command=_command("layer", self), say=_say),
            json=self.json,
            save=self.save,
        )


@dataclass(frozen=True, kw_only=True)
class Router:
    """What adaptive clustering adds to the plain layer, by where its statistics come from."""

    shapes: tuple[str, ...] = ()
    """As in `bench layer`."""
    dtype: str = "bf16"
    """bf16, fp16 or fp32."""
    graph: bool = False
    """Time replays of a CUDA graph."""
    compile: bool = False
    """torch.compile the whole layer."""
    repeat: int = 50
    """Rounds."""
    device: str = "auto"
    """cuda where there is one."""
    json: bool = False
    """Print as JSON."""
    save: bool = False
    """Also write benchmarks/results/DATE-router-DEVICE.json."""

    def run(self) -> int:
        from acmoe.bench.router import RouterBenchConfig, bench_router

        config = RouterBenchConfig(
            shapes=self.shapes,
            dtype=self.dtype,
            graph=self.graph,
            compile=self.compile,
            repeat=self.repeat,
            device=self.device,
        )
        return _show(
            bench_router(config, command=_command("router", self), say=_say),
            json=self.json,
            save=self.save,
        )


@dataclass(frozen=True, kw_only=True)
class Train:
    """Tokens or images a second of whole training steps, router by router."""

    models: tuple[str, ...] = ()
    """Names of `acmoe models`. None: four of the paper's, or on a CPU two nano ones."""
    routers: tuple[str, ...] = ("smoe", "adaptive")
    """The first is what the others are compared with; `paper` is AC with the paper's statistics."""
    variant: tuple[str, ...] = ()
    """eager, compile, graph, compile+graph. None: all, or on a CPU eager."""
    batch: int | None = None
    """Streams or images; none: 24,576 tokens as in the paper, or 128 images."""
    options: tuple[str, ...] = ()
    """Changes of the models' configs, such as span=512."""
    precision: str = "bf16"
    """bf16 (autocast) or fp32."""
    repeat: int = 20
    """Rounds."""
    device: str = "auto"
    """cuda where there is one."""
    json: bool = False
    """Print as JSON."""
    save: bool = False
    """Also write benchmarks/results/DATE-train-DEVICE.json."""

    def run(self) -> int:
        from acmoe.bench.train import TrainBenchConfig, bench_train

        config = TrainBenchConfig(
            models=self.models,
            routers=self.routers,
            variants=self.variant,
            batch=self.batch,
            options=self.options,
            precision=self.precision,
            repeat=self.repeat,
            device=self.device,
        )
        return _show(
            bench_train(config, command=_command("train", self), say=_say),
            json=self.json,
            save=self.save,
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time goes: kernels of a layer (by shape) or of a training step (by model)."""

    shapes: tuple[str, ...] = ()
    """As in `bench layer`."""
    models: tuple[str, ...] = ()
    """As in `bench train`."""
    statistics: str = "plain"
    """Of the layer's router: plain, batch, running or current."""
    router: str = "smoe"
    """Of the trained model."""
    variant: str = "eager"
    """Of the training step: eager, compile, graph or compile+graph."""
    batch: int | None = None
    """Streams or images of the training step."""
    options: tuple[str, ...] = ()
    """As in `bench train`."""
    dtype: str = "bf16"
    """Of the layer."""
    top: int = 30
    """Kernels shown; the others are summed up."""
    device: str = "auto"
    """cuda where there is one."""
    json: bool = False
    """Print as JSON."""
    save: bool = False
    """Also write benchmarks/results/DATE-profile-DEVICE.json."""

    def run(self) -> int:
        from acmoe.bench.profile import ProfileConfig, bench_profile

        config = ProfileConfig(
            shapes=self.shapes,
            models=self.models,
            statistics=self.statistics,
            router=self.router,
            variant=self.variant,
            batch=self.batch,
            options=self.options,
            dtype=self.dtype,
            top=self.top,
            device=self.device,
        )
        return _show(
            bench_profile(config, command=_command("profile", self)),
            json=self.json,
            save=self.save,
        )


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Sweep block sizes and rings of the expert kernels, and write the fastest where they look."""

    shapes: tuple[str, ...] = ()
    """As in `bench layer`."""
    kernels: tuple[str, ...] = ()
    """up, down, hidden, down_weight, up_weight, input: block sizes of these; and with ring_ before
    any but up: a ring for it, if that is faster. None: all."""
    table: Path | None = None
    """The table to write; none: that which ACMOE_TUNED names, else the package's own. Kernels look
    into the file that ACMOE_TUNED names first."""
    workers: int | None = None
    """Processes that compile; none: one a core."""
    repeat: int = 15
    """Timed calls of each candidate."""
    json: bool = False
    """Print as JSON."""
    save: bool = False
    """Also write benchmarks/results/DATE-tune-DEVICE.json."""

    def run(self) -> int:
        from acmoe.bench.tune import TuneConfig, bench_tune
        from acmoe.bench.tune_candidates import KERNELS

        config = TuneConfig(
            shapes=self.shapes,
            kernels=self.kernels or KERNELS,
            table=None if self.table is None else str(self.table),
            workers=self.workers,
            repeat=self.repeat,
        )
        report = bench_tune(config, command=_command("tune", self), say=_say)
        return _show(report, json=self.json, save=self.save)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Write the newest saved reports into the page of the documentation, between its markers."""

    page: Path = Path("docs/performance.md")
    """The page to update."""
    results: Path = Path("benchmarks/results")
    """Folder of saved reports."""

    def run(self) -> int:
        from acmoe.bench.table import update_page

        count = update_page(self.page, self.results)
        print(f"{self.page}: {count} {'table' if count == 1 else 'tables'}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the layer, the router or training; find block sizes; write the tables."""

    action: (
        Annotated[Layer, tyro.conf.subcommand("layer")]
        | Annotated[Router, tyro.conf.subcommand("router")]
        | Annotated[Train, tyro.conf.subcommand("train")]
        | Annotated[Profile, tyro.conf.subcommand("profile")]
        | Annotated[Tune, tyro.conf.subcommand("tune")]
        | Annotated[Table, tyro.conf.subcommand("table")]
    ) = Layer()
    which: bool = False
    """Only say what runs on this machine, and what keeps the faster from it: for olmoe's experts,
    or for those of `--which layer --shapes ...`."""

    def run(self) -> int:
        if not self.which:
            return self.action.run()
        import torch

        from acmoe.bench.shapes import find_shapes
        from acmoe.bench.which import rivals, which
        from acmoe.evaluate.device import pick_device

        device = pick_device("auto")
        for shape in find_shapes(getattr(self.action, "shapes", ()) or ("olmoe",), device):
            title = f"bf16 on {device}, experts of {shape.name}"
            table = RichTable("what", "name", "runs", "obstacle", title=title)
            where = (device, torch.bfloat16, shape)
            for choice in (*which(*where), *rivals(*where)):
                runs = "yes" if choice.runs else "can" if choice.obstacle is None else "no"
                table.add_row(choice.op, choice.backend, runs, choice.obstacle or "")
            Console().print(table)
        return 0
