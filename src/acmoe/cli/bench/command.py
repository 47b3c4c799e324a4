"""`acmoe bench`: measure speed, side by side with every baseline that is installed."""

from dataclasses import dataclass, fields
from typing import Annotated

import tyro
from rich.console import Console

from acmoe.cli.arguments.shared import Device, Json
from acmoe.cli.bench.generate import Generate
from acmoe.cli.bench.output import command_of, say, show
from acmoe.cli.bench.tools import Host, Profile, Scaling, Table, Tune


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Time one MoE layer beside baselines, forward and with backward, in milliseconds."""

    shapes: tuple[str, ...] = ()
    """Layers to measure: olmoe, qwen30b, fine, mixtral, switch, swin, dsv2lite, dsv3, gptoss,
    qwen3next, granite, scout, phi, mixtral22b, nano, tiny or tiny-relu. Your own is
    TOKENSxFEATURESxHIDDENxEXPERTSxTOP_K, with -relu or -gelu appended if it is not gated.
    NAME@TOKENS is a layer with another number of tokens. With NAME+skew nearly half of the tokens
    choose one expert, with NAME+even all experts get the same number of rows.
    If none is given, a GPU measures the first six and a CPU the tiny ones."""
    tokens: tuple[int, ...] = ()
    """Numbers of tokens to measure every layer with, instead of its own."""
    rivals: tuple[str, ...] = ()
    """Baselines to measure beside acmoe: acmoe+compile, grouped_mm, grouped_mm+compile, scattermoe,
    sonicmoe, transformers, transformers-eager, liger, triton, or torch (the reference in plain
    PyTorch). One that cannot run here is listed with the reason. If none is given: all but triton
    and torch."""
    dtype: str = "auto"
    """Data type of weights and tokens: bf16, fp16 or fp32; auto takes bf16 on a GPU and fp32 on a
    CPU."""
    forward: bool = False
    """Time the forward pass without gradients alone. No backward runs, so that its memory is not
    needed and gradients are not checked."""
    skew: bool = False
    """Draw weights with which nearly half of the tokens choose the same expert."""
    graph: bool = False
    """Time replays of a CUDA graph, which excludes the launch overhead of a small layer."""
    repeat: int = 50
    """Number of rounds, at least 2. Every implementation runs once per round."""
    device: Device = "auto"
    json: Json = False
    save: bool = False
    """Also write benchmarks/results/DATE-layer-DEVICE.json; sonicmoe alone, --skew, --forward and
    --graph add their names after `layer`."""

    def run(self) -> int:
        from acmoe.lab.bench.layers.layer import LayerConfig, bench_layer

        config = LayerConfig(
            shapes=self.shapes,
            tokens=self.tokens,
            rivals=self.rivals,
            dtype=self.dtype,
            forward=self.forward,
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
    """Time what each statistics mode of the adaptive router adds to a layer, in milliseconds."""

    shapes: tuple[str, ...] = ()
    """Layers to measure, as in `bench layer`."""
    tokens: tuple[int, ...] = ()
    """Numbers of tokens to measure every layer with, instead of its own."""
    dtype: str = "auto"
    """Data type of weights and tokens: bf16, fp16 or fp32; auto takes bf16 on a GPU and fp32 on a
    CPU."""
    forward: bool = False
    """Time the forward pass without gradients alone, of the plain router and of the statistics that
    decode, running and prefix: the others depend on later tokens."""
    statistics: tuple[str, ...] = ("batch", "running", "current")
    """Statistics to measure: batch, running, current (those of the batch, measured by the layer
    itself), prefix or sequence."""
    length: int | None = None
    """Tokens of a sequence, for prefix and sequence; 512 if it is not given."""
    graph: bool = False
    """Time replays of a CUDA graph, which excludes launch overhead."""
    compile: bool = False
    """Apply torch.compile to the whole layer."""
    repeat: int = 50
    """Number of rounds, at least 2. Every mode runs once per round."""
    device: Device = "auto"
    json: Json = False
    save: bool = False
    """Also write benchmarks/results/DATE-router-DEVICE.json; --compile, --forward and --graph add
    their names after `router`."""

    def run(self) -> int:
        from acmoe.lab.bench.layers.router import RouterBenchConfig, bench_router

        config = RouterBenchConfig(
            shapes=self.shapes,
            tokens=self.tokens,
            dtype=self.dtype,
            forward=self.forward,
            graph=self.graph,
            compile=self.compile,
            statistics=self.statistics,
            length=self.length,
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
    """Time whole training steps with each router, in tokens or images per second."""

    models: tuple[str, ...] = ()
    """Models to train, by their names in `acmoe models`. If none is given: four of the paper's
    models on a GPU, two nano models on a CPU."""
    routers: tuple[str, ...] = ("smoe", "adaptive")
    """Routers to measure; the others are compared with the first. `paper` is the adaptive router
    with the paper's statistics."""
    variant: tuple[str, ...] = ()
    """Ways to run a step: eager, compile, graph, compile+graph. If none is given: all on a GPU,
    eager on a CPU."""
    batch: int | None = None
    """Streams of text, or images, per step. If not given: streams for 24,576 tokens as in the
    paper, or 128 images; for nano models 4."""
    options: tuple[str, ...] = ()
    """Settings of the models' configs to change, such as span=512."""
    precision: str = "bf16"
    """Precision of the step: bf16 (autocast) or fp32."""
    repeat: int = 20
    """Number of rounds, at least 2. Every router and variant runs once per round."""
    device: Device = "auto"
    json: Json = False
    save: bool = False
    """Also write benchmarks/results/DATE-train-DEVICE.json."""

    def run(self) -> int:
        from acmoe.lab.bench.models.train import TrainBenchConfig, bench_train

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
class Hf:
    """Time transformers models with each experts implementation: training steps and decoding."""

    models: tuple[str, ...] = ()
    """Models to measure, with random weights: qwen3-30b-a3b, olmoe-7b, gpt-oss-20b or tiny. If none
    is given, a GPU measures the first three and a CPU the tiny one."""
    implementations: tuple[str, ...] = ("acmoe", "grouped_mm", "eager")
    """Experts implementations of transformers to measure. The others are compared with grouped_mm,
    which `generate` on a GPU replaces by batched_mm for decoding."""
    tokens: int = 8192
    """Tokens of a training step, in sequences of 1,024; 0 measures no training."""
    batches: tuple[int, ...] = (1, 32)
    """Numbers of sequences to decode together."""
    new_tokens: int = 16
    """Tokens to decode, after a prompt of 16. The time of a token includes its share of the
    prompt's."""
    layers: int | None = None
    """Layers of each model. If not given: 8 of qwen3-30b-a3b's 48, all 16 of olmoe-7b's, 8 of
    gpt-oss-20b's 24."""
    compile: bool = False
    """Let `generate` compile the decoding step, which takes a minute for each measurement."""
    dtype: str = "auto"
    """Data type of the weights: bf16, fp16 or fp32; auto takes bf16 on a GPU and fp32 on a CPU."""
    repeat: int = 5
    """Number of rounds, at least 2. Every implementation runs once per round."""
    device: Device = "auto"
    json: Json = False
    save: bool = False
    """Also write benchmarks/results/DATE-hf-DEVICE.json."""

    def run(self) -> int:
        from acmoe.lab.bench.models.hf import HfBenchConfig, bench_hf

        config = HfBenchConfig(
            models=self.models,
            implementations=self.implementations,
            tokens=self.tokens,
            batches=self.batches,
            new_tokens=self.new_tokens,
            layers=self.layers,
            compile=self.compile,
            dtype=self.dtype,
            repeat=self.repeat,
            device=self.device,
        )
        return show(
            bench_hf(config, command=command_of("hf", self), say=say),
            json=self.json,
            save=self.save,
        )


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure layer, router, training or decoding; tune kernels; write the tables."""

    action: (
        Annotated[Layer, tyro.conf.subcommand("layer")]
        | Annotated[Router, tyro.conf.subcommand("router")]
        | Annotated[Train, tyro.conf.subcommand("train")]
        | Annotated[Hf, tyro.conf.subcommand("hf")]
        | Annotated[Generate, tyro.conf.subcommand("generate")]
        | Annotated[Host, tyro.conf.subcommand("host")]
        | Annotated[Profile, tyro.conf.subcommand("profile")]
        | Annotated[Tune, tyro.conf.subcommand("tune")]
        | Annotated[Table, tyro.conf.subcommand("table")]
        | Annotated[Scaling, tyro.conf.subcommand("scaling")]
    ) = Layer()
    which: bool = False
    """Measure nothing; list which kernels this machine uses, and why faster ones cannot run. It
    looks at an MoE layer of the shape olmoe, in bf16 on a GPU and float32 elsewhere, or at those of
    `--which layer --shapes ...`."""

    def run(self) -> int:
        if not self.which:
            return self._measure()
        self._check_only_shapes()
        import torch

        from acmoe.cli.bench.terminal import whole_word_table
        from acmoe.lab.bench.shapes import find_shapes
        from acmoe.lab.bench.which import baselines, which
        from acmoe.runtime import pick_device

        device = pick_device("auto")
        # As the benchmarks take it, if no option says otherwise.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        for shape in find_shapes(getattr(self.action, "shapes", ()) or ("olmoe",), device):
            title = f"{str(dtype).removeprefix('torch.')} on {device}, experts of {shape.name}"
            headings = ("op", "kernel", "runs", "why not")
            rows = []
            where = (device, dtype, shape)
            for choice in (*which(*where), *baselines(*where)):
                runs = "yes" if choice.runs else "can" if choice.unsupported is None else "no"
                rows.append((choice.op, choice.backend, runs, choice.unsupported or ""))
            console = Console()
            console.print(whole_word_table(title, headings, rows, console.width))
        return 0

    def _check_only_shapes(self) -> None:
        """Raise a UserError if --which got an option that it does not read."""
        from acmoe.errors import check

        for option in fields(self.action):
            value = getattr(self.action, option.name)
            check(
                option.name == "shapes" or value == option.default,
                f"--which measures nothing, so that --{option.name} has no effect; leave one of "
                "them out",
            )

    def _measure(self) -> int:
        """Run the subcommand. With --save, check first that the report can be written."""
        if getattr(self.action, "save", False):
            from acmoe.lab.bench.harness.results import FOLDER
            from acmoe.storage.writable import check_can_fill

            check_can_fill(FOLDER)
        return self.action.run()
