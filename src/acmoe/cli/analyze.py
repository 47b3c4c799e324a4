"""`acmoe analyze RUN`: measure and draw what the routers of a trained model do."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from acmoe.cli.threads import run_threads
from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from acmoe.analyze.analysis import Analysis
    from acmoe.analyze.sampling import AnalyzeConfig, Sampled


@dataclass(frozen=True, kw_only=True)
class Analyze:
    """Measure load, stability, entropy, separation, scale and conditioning of every MoE layer."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    split: Literal["valid", "test"] = "test"
    """The split of the run's data to take the sample from."""
    tokens: int | None = None
    """Text: number of tokens to analyze, from the start of the split; 4096 if not given."""
    images: int | None = None
    """Images: number of images to analyze, with all patches of each; 64 if not given."""
    statistics: Literal["batch", "running", "prefix", "sequence"] | None = None
    """Statistics mode of the adaptive routers; the model's own if not given."""
    capacity: str | None = None
    """Images: capacity factor of the experts. none drops no token, so the images of a batch do not
    compete for experts; a number such as the paper's 1.25 limits the tokens of each expert; model
    takes the factor of the training. none if not given."""
    contaminate: float | None = None
    """Text: also route a copy with this fraction of its words or bytes replaced."""
    attack: Literal["fgsm", "pgd", "spsa"] | None = None
    """Images: also route images under this attack."""
    eps: str | None = None
    """Radius of the attack as a fraction of the pixel range, such as 2/255; 1/255 if not given."""
    batch: int | None = None
    """Text: number of rows that the text is cut into, read side by side; 8 if not given. Images:
    images per forward pass; 64 if not given."""
    which: Literal["best", "last"] = "best"
    """The checkpoint to load: the best by validation, or the last."""
    seed: int = 0
    """Seed of the images' order, the attack, and the tokens drawn for silhouettes and maps."""
    device: str = "auto"
    """Device to run on; auto takes a GPU if there is one."""
    threads: int | None = None
    """Number of CPU threads. If not given: OMP_NUM_THREADS, else 1 for small models and torch's
    default for others."""
    out: Path | None = None
    """Folder for analysis.json and the figures; RUN/analysis if not given."""
    figures: bool = True
    """Draw no figures. Without this option they are written as PNG and SVG."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        from acmoe.analyze.analysis import analyze
        from acmoe.analyze.sampling import sample_run
        from acmoe.data.progress import progress_bars
        from acmoe.storage.atomic import replace_text, report_write_errors

        config = self.config()
        run_threads(self.threads, self.folder, self.device)
        with progress_bars(Console(stderr=True)) as progress:
            progress("routing the sample", 0, 1)
            sampled = sample_run(self.folder, config)
            progress("routing the sample", 1, 1)
            analysis = analyze(sampled, seed=self.seed, progress=progress)
        folder = self.out or self.folder / "analysis"
        with report_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        text = json_text(analysis.to_json())
        replace_text(folder / "analysis.json", text + "\n")
        lines = [f"wrote {folder / 'analysis.json'}"]
        if self.figures:
            lines += _draw(sampled, analysis, folder, self.seed)
        if self.json:
            print(text)
            return 0
        _show(analysis)
        for line in lines:
            print(line)
        return 0

    def config(self) -> "AnalyzeConfig":
        from dataclasses import replace

        from acmoe.analyze.sampling import AnalyzeConfig
        from acmoe.config.images.attack import attack_config, parse_eps
        from acmoe.config.images.data import parse_capacity
        from acmoe.config.text.data import ContaminationConfig
        from acmoe.errors import check

        check(
            self.eps is None or self.attack is not None,
            f"--eps {self.eps} without an attack; add --attack pgd",
        )
        attack = None
        if self.attack is not None:
            attack = attack_config(self.attack, eps=(parse_eps(self.eps or "1/255"),))
            attack = replace(attack, split=self.split, seed=self.seed)
        corrupt = None if self.contaminate is None else ContaminationConfig(rate=self.contaminate)
        return AnalyzeConfig(
            split=self.split,
            which=self.which,
            tokens=self.tokens,
            images=self.images,
            statistics=self.statistics,
            capacity=None if self.capacity is None else parse_capacity(self.capacity),
            batch=self.batch,
            contamination=corrupt,
            attack=attack,
            seed=self.seed,
            device=self.device,
        )


def _draw(sampled: "Sampled", analysis: "Analysis", folder: Path, seed: int) -> list[str]:
    from acmoe.analyze.draw import save_figures
    from acmoe.data.progress import progress_bars
    from acmoe.errors import UserError

    try:
        with progress_bars(Console(stderr=True)) as progress:
            paths = save_figures(sampled, analysis, folder, seed=seed, progress=progress)
    except UserError as missing:
        return [f"no figures: {missing}"]
    return [f"wrote {path}" for path in paths]


def _show(analysis: "Analysis") -> None:
    from acmoe.analyze.reading import ROUTING, SPACE, read, routing_row, space_row

    console = Console()
    console.print(
        f"step {analysis.step}, {analysis.sample}; statistics {analysis.statistics}; loss "
        f"{analysis.loss:.4f} nats",
        highlight=False,
    )
    routing = Table(*ROUTING, title="load (std in points), entropy (bits), stability; AC: adaptive")
    space = Table(*SPACE, title="router input, plain > as read; own: clusters' own part of log M")
    for number, layer in enumerate(analysis.layers, start=1):
        routing.add_row(*routing_row(number, layer))
        space.add_row(*space_row(number, layer))
    console.print(routing)
    console.print(space)
    for sentence in read(analysis):
        console.print(sentence, highlight=False)
