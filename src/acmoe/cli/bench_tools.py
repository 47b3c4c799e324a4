"""`acmoe bench profile`, `tune` and `table`: for those who make it faster, and write it down."""

from dataclasses import dataclass
from pathlib import Path

from acmoe.cli.bench_output import command_of, say, show


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
        from acmoe.lab.bench.profile import ProfileConfig, bench_profile

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
        return show(
            bench_profile(config, command=command_of("profile", self)),
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
        from acmoe.lab.bench.tune import TuneConfig, bench_tune
        from acmoe.lab.bench.tune_candidates import KERNELS

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

    page: Path = Path("docs/performance.md")
    """The page to update."""
    results: Path = Path("benchmarks/results")
    """Folder of saved reports."""

    def run(self) -> int:
        from acmoe.lab.bench.table import update_page

        count = update_page(self.page, self.results)
        print(f"{self.page}: {count} {'table' if count == 1 else 'tables'}")
        return 0
