"""`acmoe bench host`, `profile`, `tune`, `table` and `scaling`: tools for developers."""

from dataclasses import dataclass
from pathlib import Path

from acmoe.cli.arguments.shared import Device, Json
from acmoe.cli.bench.output import command_of, say, show


@dataclass(frozen=True, kw_only=True)
class Host:
    """Time the host in one eager call, in microseconds, without waiting for the GPU.

    It calls a layer that follows another MoE layer, in three ways: without gradients, as a training
    forward, and as a training forward with its backward. On a CPU the time is that of the whole
    call, computation included.
    """

    shapes: tuple[str, ...] = ()
    """Layers to measure, as in `bench layer`."""
    tokens: tuple[int, ...] = ()
    """Numbers of tokens to measure every layer with, instead of its own."""
    dtype: str = "auto"
    """Data type of weights and tokens: bf16, fp16 or fp32; auto takes bf16 on a GPU and fp32 on a
    CPU."""
    forward: bool = False
    """Time the calls without gradients alone."""
    repeat: int = 50
    """Number of rounds of ten calls, at least 2. Quartiles are those of the rounds' means."""
    device: Device = "auto"
    json: Json = False
    save: bool = False
    """Also write benchmarks/results/DATE-host-DEVICE.json; --forward adds its name after `host`."""

    def run(self) -> int:
        from acmoe.lab.bench.layers.host import HostConfig, bench_host

        config = HostConfig(
            shapes=self.shapes,
            tokens=self.tokens,
            dtype=self.dtype,
            forward=self.forward,
            repeat=self.repeat,
            device=self.device,
        )
        report = bench_host(config, command=command_of("host", self), say=say)
        return show(report, json=self.json, save=self.save)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """List the kernels of a layer (by shape) or of a training step (by model) with their times."""

    shapes: tuple[str, ...] = ()
    """Layers to profile, as in `bench layer`. If neither shapes nor models are given: all."""
    tokens: tuple[int, ...] = ()
    """Numbers of tokens to profile every layer with, instead of its own."""
    forward: bool = False
    """Profile the layer's forward without gradients, instead of forward and backward."""
    models: tuple[str, ...] = ()
    """Models whose training step to profile, by their names in `acmoe models`."""
    statistics: str = "plain"
    """Statistics of the layer's router: plain (no adaptive router), batch, running, or current
    (batch statistics of the layer's own tokens)."""
    router: str = "smoe"
    """Router of the trained model."""
    variant: str = "eager"
    """Way to run the training step: eager, compile, graph or compile+graph."""
    batch: int | None = None
    """Streams of text, or images, per training step; as in `bench train` if not given."""
    options: tuple[str, ...] = ()
    """Settings of the models' configs to change, such as span=512."""
    dtype: str = "bf16"
    """Data type of the layer: bf16, fp16 or fp32; of a training step, its precision: bf16 or
    fp32."""
    top: int = 30
    """Number of kernels to list; the others are summed up in one row."""
    device: Device = "auto"
    json: Json = False
    save: bool = False
    """Also write benchmarks/results/DATE-profile-DEVICE.json."""

    def run(self) -> int:
        from acmoe.lab.bench.profile import ProfileConfig, bench_profile

        config = ProfileConfig(
            shapes=self.shapes,
            tokens=self.tokens,
            forward=self.forward,
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
        return show(
            bench_profile(config, command=command_of("profile", self)),
            json=self.json,
            save=self.save,
        )


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Find the fastest block sizes and pipelines of the expert kernels, and store them."""

    shapes: tuple[str, ...] = ()
    """Layers to tune for, as in `bench layer`."""
    kernels: tuple[str, ...] = ()
    """Kernels to tune. up, down, hidden, down_weight, up_weight and input are the block sizes of
    these GEMMs. pipeline_down, pipeline_hidden and so on, for all but up, are their Hopper
    pipelines. If none is given: all."""
    table: Path | None = None
    """The table to write. If not given: the file that ACMOE_TUNED names, or the package's own
    table. Kernels look into the file that ACMOE_TUNED names first."""
    workers: int | None = None
    """Number of processes that compile; one per core if not given."""
    repeat: int = 15
    """Number of timed calls of each candidate, at least 2."""
    json: Json = False
    save: bool = False
    """Also write benchmarks/results/DATE-tune-DEVICE.json."""

    def run(self) -> int:
        from acmoe.lab.bench.tune.candidates import KERNELS
        from acmoe.lab.bench.tune.search import TuneConfig, bench_tune

        config = TuneConfig(
            shapes=self.shapes,
            kernels=self.kernels or KERNELS,
            table=None if self.table is None else str(self.table),
            workers=self.workers,
            repeat=self.repeat,
        )
        report = bench_tune(config, command=command_of("tune", self), say=say)
        return show(report, json=self.json, save=self.save)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Write the newest saved reports into the page of the documentation, between its markers."""

    page: Path = Path("docs/performance/reports.md")
    """The page to update."""
    results: Path = Path("benchmarks/results")
    """Folder with the saved reports."""

    def run(self) -> int:
        from acmoe.lab.bench.harness.table import update_page

        count = update_page(self.page, self.results)
        print(f"{self.page}: {count} {'table' if count == 1 else 'tables'}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Compute what training on many GPUs sends in a step, and what statistics add; no measurement.

    The formulas and their assumptions are on the page docs/scaling.md.
    """

    gpus: tuple[int, ...] = (8, 64, 512, 2048, 10240)
    """Numbers of GPUs."""
    bandwidth: float = 50.0
    """Gigabytes a second that each GPU sends to other machines; 50 is a card of 400 Gb/s."""
    hop: float = 8.0
    """Microseconds of one hop of a reduction."""

    def run(self) -> int:
        from acmoe.errors import check, check_not_negative, check_positive
        from acmoe.lab.bench.scaling import Machine, table

        check_positive(self.bandwidth, "--bandwidth")
        check_not_negative(self.hop, "--hop")
        for gpus in self.gpus:
            check(gpus >= 1, f"--gpus {gpus}; it must be at least 1")
        machine = Machine(bandwidth=self.bandwidth * 1e9, hop=self.hop * 1e-6)
        for line in table(machine, self.gpus):
            print(line)
        return 0
