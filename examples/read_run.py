"""Read a run folder in Python: its metrics, its best checkpoint, how it routes, and a figure.

    python examples/read_run.py runs/demo/acmoe    # a run of a language model on bytes
    python examples/read_run.py                    # trains a tiny one first: seconds on a CPU

The figure needs matplotlib: pip install 'acmoe[plots]'.
"""

import sys
from pathlib import Path

import torch
from rich.console import Console

from acmoe.analyze.analysis import Analysis, analyze
from acmoe.analyze.figures.load import save_load
from acmoe.analyze.sampling import AnalyzeConfig, sample_run
from acmoe.config.text.train import override_run
from acmoe.evaluate.run import Run, open_run
from acmoe.recipes import recipe
from acmoe.train.run import train

SMALL = "batch=4 warmup=5 log_every=5 eval_every=10 eval_tokens=2000 checkpoint_every=10 device=cpu"
SMALLER = "model.dim=16 model.heads=2 model.hidden=16 model.block=32 model.span=64"


def tiny_run(folder: Path, steps: int) -> Path:
    """Train `switch-nano-acmoe` in small. Where the run is finished already, do nothing."""
    text = f"data.folder={folder.parent}/stdlib data.limit=40000"
    changes = f"{SMALL} {SMALLER} steps={steps} {text}".split()
    train(override_run(recipe("switch-nano-acmoe"), changes), folder, console=Console(quiet=True))
    return folder


def show_metrics(run: Run) -> None:
    """Print the validation curve. Each line of metrics.jsonl is one dictionary."""
    print(f"{run.folder}: {run.config.model.router.name} router, {run.config.steps} steps")
    for record in run.metrics("valid"):
        print(
            f"  step {record['step']:5}: {record['bits_per_byte']:.3f} bits per byte in validation"
        )
    losses = [record["loss"] for record in run.metrics("train")]
    print(f"  training loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last (nats per byte)")


@torch.no_grad()
def show_checkpoint(run: Run) -> None:
    """Load the best checkpoint, which is an ordinary module, and predict a byte."""
    model = run.model("best").eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"best checkpoint: step {run.step('best')}, {parameters:,} parameters")
    prompt = torch.tensor([list(b"import ")])
    likely = model(prompt).logits[0, -1].softmax(-1).topk(3)
    pairs = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
    shown = [f"{chr(byte)!r} ({probability:.0%})" for byte, probability in pairs]
    print(f"  after 'import ' it expects {', '.join(shown)}")


def show_routing(run: Run, tokens: int) -> Analysis:
    """Route a sample of the test text, print some measures of each MoE layer, draw the load."""
    analysis = analyze(sample_run(run.folder, AnalyzeConfig(tokens=tokens, device="cpu")))
    for depth, layer in enumerate(analysis.layers):
        scale = "M = I" if layer.scale is None else f"rms of log M {layer.scale.rms_log:.3f}"
        shares = " ".join(f"{share:.0f}" for share in layer.load.share)
        print(f"  MoE layer {depth}: {shares} percent of the tokens at each expert; {scale}")
    load = {run.config.model.router.name: [layer.load.share for layer in analysis.layers]}
    figure, _ = save_load(load, run.folder / "figures", title=f"load, {run.folder.name}")
    print(f"  drew {figure}")
    return analysis


def main(folder: Path | None = None, *, steps: int = 40, tokens: int = 512) -> Analysis:
    run = open_run(folder or tiny_run(Path("runs/read_run"), steps))
    show_metrics(run)
    show_checkpoint(run)
    return show_routing(run, tokens)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
