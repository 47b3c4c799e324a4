"""`acmoe bench`: how fast, side by side with every rival that is installed."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table as RichTable

from acmoe.cli.bench_output import command_of, say, show
from acmoe.cli.bench_tools import Profile, Table, Tune


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
        from acmoe.lab.bench.layer import LayerConfig, bench_layer

        config = LayerConfig(
            shapes=self.shapes,
            rivals=self.rivals,
            dtype=self.dtype,
            skew=self.skew,
            graph=self.graph,
            repeat=self.repeat,
            device=self.device,
        )
        return show(
            bench_layer(config, command=command_of("layer", self), say=say),
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
        from acmoe.lab.bench.router import RouterBenchConfig, bench_router

        config = RouterBenchConfig(
            shapes=self.shapes,
            dtype=self.dtype,
            graph=self.graph,
            compile=self.compile,
            repeat=self.repeat,
            device=self.device,
        )
        return show(
            bench_router(config, command=command_of("router", self), say=say),
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
        from acmoe.lab.bench.train import TrainBenchConfig, bench_train

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
        return show(
            bench_train(config, command=command_of("train", self), say=say),
            json=self.json,
            save=self.save,
        )


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

        from acmoe.lab.bench.shapes import find_shapes
        from acmoe.lab.bench.which import rivals, which
        from acmoe.runtime import pick_device

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
