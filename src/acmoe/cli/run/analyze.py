"""`acmoe analyze RUN`: measure and draw what the routers of a trained model do.

`acmoe analyze --hf PATH --text FILE` does so for a model of HuggingFace transformers.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from acmoe.cli.arguments.shared import Device, Json
from acmoe.cli.run.options import (
    AttackDirections,
    AttackSteps,
    ImageCapacity,
    Threads,
    check_contaminate,
    run_threads,
    set_attack_options,
)
from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from acmoe.analyze.analysis import Analysis
    from acmoe.analyze.hf_text import HuggingFaceConfig
    from acmoe.analyze.sampling import AnalyzeConfig, Sampled
    from acmoe.config.images.attack import AttackConfig
    from acmoe.data.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Analyze:
    """Measure load, stability, entropy, separation, scale and conditioning of every MoE layer."""

    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[RUN]")] = None
    """Folder of the run. Leave it out with --hf."""
    hf: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """In place of RUN: folder of a HuggingFace model with MoE layers, adaptive or not. It is read
    from disk, and no remote code runs."""
    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With --hf: the text to route, in UTF-8."""
    bytes: bool = False
    """With --hf: take the bytes of the text as token ids, for a model without tokenizer."""
    layers: tuple[int, ...] = ()
    """With --hf: MoE layers, from 1, whose router inputs are kept for separation, condition, scale
    and maps; all if not given. Load and stability are measured at all layers."""
    split: Literal["valid", "test"] | None = None
    """The split of the run's data to take the sample from; test if not given."""
    tokens: Annotated[int | None, tyro.conf.arg(aliases=("--max-tokens",))] = None
    """Text: number of tokens to analyze, from its start; 4096 if not given."""
    images: int | None = None
    """Images: number of images to analyze, with all patches of each; 64 if not given."""
    statistics: Literal["batch", "running", "prefix", "sequence"] | None = None
    """Statistics mode of the adaptive routers; the model's own if not given."""
    capacity: ImageCapacity = None
    contaminate: float | None = None
    """Text: also route a copy with this fraction of its words or bytes replaced."""
    attack: Literal["fgsm", "pgd", "spsa"] | None = None
    """Images: also route images under this attack. spsa scores each image 5,120 times, which takes
    minutes on a CPU; smaller --images, --steps and --directions shorten it."""
    eps: str | None = None
    """Radius of the attack as a fraction of the pixel range, such as 2/255; 1/255 if not given."""
    steps: AttackSteps = None
    directions: AttackDirections = None
    batch: int | None = None
    """Text: number of rows that the text is cut into, read side by side; 8 if not given. Images:
    images per forward pass; 64 if not given. With --hf: rows of at most 512 tokens per forward
    pass; 8 if not given."""
    which: Literal["best", "last"] | None = None
    """The checkpoint to load: the best by validation, or the last; best if not given."""
    seed: int = 0
    """Seed of the images' order, the attack, and the tokens drawn for silhouettes and maps."""
    device: Device = "auto"
    threads: Threads = None
    out: Path | None = None
    """Folder for analysis.json and the figures; RUN/analysis or PATH/analysis if not given."""
    figures: bool = True
    """Draw no figures. Without this option they are written as PNG and SVG."""
    json: Json = False

    def run(self) -> int:
        from acmoe.analyze.analysis import analyze
        from acmoe.data.progress import progress_bars
        from acmoe.errors import check
        from acmoe.storage.atomic import replace_text, report_write_errors
        from acmoe.storage.writable import check_can_fill

        check(0 <= self.seed < 2**63, f"--seed {self.seed}; it must lie between 0 and 2**63 - 1")
        check_contaminate(self.contaminate)
        where = self.hf or self.folder
        folder = self.out or (where or Path()) / "analysis"
        # Without a run, or a folder of one, `sample` says what is wrong.
        if self.out is not None or (where is not None and where.is_dir()):
            check_can_fill(folder)
        with progress_bars(Console(stderr=True)) as progress:
            progress("routing the sample", 0, 1)
            sampled = self.sample(progress)
            progress("routing the sample", 1, 1)
            analysis = analyze(sampled, seed=self.seed, progress=progress)
        with report_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        text = json_text(analysis.to_json())
        replace_text(folder / "analysis.json", text + "\n")
        lines = [f"wrote {folder / 'analysis.json'}"]
        if self.hf is not None:
            lines += _explorer(sampled, analysis, folder)
        if self.figures:
            lines += _draw(sampled, analysis, folder, self.seed)
        if self.json:
            print(text)
            return 0
        _show(analysis)
        for line in lines:
            print(line)
        return 0

    def sample(self, progress: "Progress") -> "Sampled":
        """Route the sample, and report the progress of an attack on it."""
        from acmoe.errors import UserError

        if self.hf is not None:
            from acmoe.analyze.huggingface import sample_folder

            return sample_folder(self.hf, self.hf_config())
        if self.folder is None:
            raise UserError(
                "no run given; say which, as in `acmoe analyze runs/demo/acmoe`, or give a "
                "HuggingFace model by --hf PATH --text FILE"
            )
        from acmoe.analyze.sampling import sample_run

        given = {"text": self.text, "layers": self.layers or None, "bytes": self.bytes}
        for option, value in given.items():
            check_unused(option, value, f"{self.folder}, a run of acmoe: it is for --hf PATH")
        config = self.config()
        run_threads(self.threads, self.folder, self.device)
        return sample_run(self.folder, config, progress=progress)

    def hf_config(self) -> "HuggingFaceConfig":
        from acmoe.analyze.hf_text import HuggingFaceConfig
        from acmoe.errors import UserError
        from acmoe.train.threads import Threads, use_threads

        if self.threads is not None:
            use_threads(Threads(self.threads, "--threads", None))
        check_unused("RUN", self.folder, f"--hf {self.hf}")
        for option in ("split", "which", "images", "capacity"):
            check_unused(option, getattr(self, option), f"--hf {self.hf}")
        for option in ("contaminate", "attack", "eps", "steps", "directions"):
            check_unused(option, getattr(self, option), f"--hf {self.hf}")
        if self.text is None:
            raise UserError(f"--hf {self.hf} needs a text to route; give --text FILE")
        return HuggingFaceConfig(
            text=self.text,
            tokens=4096 if self.tokens is None else self.tokens,
            batch=8 if self.batch is None else self.batch,
            layers=self.layers or None,
            statistics=self.statistics,
            raw_bytes=self.bytes,
            seed=self.seed,
            device=self.device,
        )

    def config(self) -> "AnalyzeConfig":
        from acmoe.analyze.sampling import AnalyzeConfig
        from acmoe.config.images.data import parse_capacity
        from acmoe.config.text.data import ContaminationConfig

        corrupt = None if self.contaminate is None else ContaminationConfig(rate=self.contaminate)
        return AnalyzeConfig(
            split=self.split or "test",
            which=self.which or "best",
            tokens=self.tokens,
            images=self.images,
            statistics=self.statistics,
            capacity=None if self.capacity is None else parse_capacity(self.capacity),
            batch=self.batch,
            contamination=corrupt,
            attack=self.attack_config(),
            seed=self.seed,
            device=self.device,
        )

    def attack_config(self) -> "AttackConfig | None":
        from dataclasses import replace

        from acmoe.config.images.attack import attack_config, parse_eps
        from acmoe.errors import check

        if self.attack is None:
            for option in ("eps", "steps", "directions"):
                value = getattr(self, option)
                advice = "spsa" if option == "directions" else "pgd"
                check(value is None, f"--{option} {value} without an attack; add --attack {advice}")
            return None
        config = set_attack_options(
            attack_config(self.attack, eps=(parse_eps(self.eps or "1/255"),)),
            steps=self.steps,
            directions=self.directions,
        )
        return replace(config, split=self.split or "test", seed=self.seed)


def check_unused(option: str, value: object, where: str) -> None:
    """Raise if an option is set that does not apply."""
    from acmoe.errors import check

    check(
        value is None or value is False, f"{option}={value} does not apply to {where}; leave it out"
    )


def _explorer(sampled: "Sampled", analysis: "Analysis", folder: Path) -> list[str]:
    from acmoe.report.huggingface import save_routing

    path = save_routing(sampled, analysis, folder)
    return [f"wrote {path}: acmoe report {folder} shows it, token by token"]


def _draw(sampled: "Sampled", analysis: "Analysis", folder: Path, seed: int) -> list[str]:
    from acmoe.analyze.draw import save_figures
    from acmoe.data.progress import progress_bars
    from acmoe.errors import UserError

    try:
        with progress_bars(Console(stderr=True)) as progress:
            paths = save_figures(sampled, analysis, folder, seed=seed, progress=progress)
    except UserError as missing:
        # Standard output may be JSON.
        print(f"no figures: {missing}", file=sys.stderr)
        return []
    return [f"wrote {path}" for path in paths]


def _show(analysis: "Analysis") -> None:
    from acmoe.analyze.reading import ROUTING, SPACE, read, routing_row, space_row

    console = Console()
    step = "" if analysis.step is None else f"step {analysis.step}, "
    loss = "" if analysis.loss is None else f"; loss {analysis.loss:.4f} nats"
    console.print(
        f"{step}{analysis.sample}; statistics {analysis.statistics}{loss}", highlight=False
    )
    routing = Table(
        *ROUTING, title="load (std in points), entropies (bits), stability; AC: adaptive"
    )
    space = Table(
        *SPACE, title="router inputs, plain -> rescaled; own: share of log M's variance by cluster"
    )
    for number, layer in enumerate(analysis.layers, start=1):
        routing.add_row(*routing_row(number, layer))
        space.add_row(*space_row(number, layer))
    console.print(routing)
    console.print(space)
    for sentence in read(analysis):
        console.print(sentence, highlight=False)
