"""Runs small enough that a test can afford dozens of steps, on a corpus written on the spot."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import load_file

from acmoe.config.text.language import LanguageConfig, language_router
from acmoe.config.text.train import DataConfig, RunConfig, override_run
from acmoe.data.text.prepare import prepare
from acmoe.evaluate.run import open_run
from acmoe.train.run import train
from cpu import settle_cpu

QUIET = Console(quiet=True)

MODEL = LanguageConfig(
    vocab_size=256,
    dim=16,
    heads=2,
    hidden=16,
    repeats=3,
    span=24,
    block=16,
    num_experts=4,
    dropout=0.1,
)


def byte_corpus(folder: Path, lines: int = 400) -> Path:
    """A prepared corpus of short, regular lines; about 13,000 bytes by default."""
    text = "".join(f"line {n}: {n} and {n} make {2 * n}.\n" for n in range(lines))
    source = folder / "source.txt"
    source.write_text(text)
    prepare("bytes", source, folder / "corpus")
    return folder / "corpus"


def word_corpus(folder: Path) -> Path:
    """A prepared corpus of whole words, some of them swapped by a contamination."""
    source = folder / "words"
    source.mkdir()
    for split, count in (("train", 120), ("valid", 30), ("test", 40)):
        lines = [
            f"the {'red' if n % 3 else 'AAA'} cat number {n % 7} saw {n % 5} dogs in house {n % 4}"
            for n in range(count)
        ]
        (source / f"{split}.txt").write_text("\n".join(lines) + "\n")
    prepare("words", source, folder / "word-corpus")
    return folder / "word-corpus"


def tiny_run(corpus: Path, *overrides: str, router: str = "adaptive") -> RunConfig:
    """20 steps of 64 tokens with every part that has a state switched on."""
    run = RunConfig(
        model=replace(MODEL, router=language_router(router, MODEL)),
        data=DataConfig(name="bytes", folder=str(corpus)),
        steps=20,
        batch=4,
        split=2,
        lr=1e-2,
        warmup=5,
        log_every=4,
        eval_every=10,
        eval_batch=2,
        eval_tokens=200,
        checkpoint_every=6,
        device="cpu",
    )
    return override_run(run, overrides)


def records(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock; fails on a torn line."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    clock = ("seconds", "tokens_per_second", "crc32")
    return [
        {key: value for key, value in json.loads(line).items() if key not in clock}
        for line in lines
    ]


def everything(folder: Path) -> dict[str, Any]:
    """Every number the last checkpoint of a run holds, but the clock."""
    last = open_run(folder).checkpoint("last")
    tensors = load_file(last / "training.safetensors")
    (weights,) = last.glob("weights-*.safetensors")
    state = json.loads((last / "state.json").read_text())
    del state["seconds"], state["seal"]
    named = {**tensors, **load_file(weights)}
    return {**{name: value.numpy().tobytes() for name, value in named.items()}, **state}


def train_in_child(config: RunConfig, folder: Path) -> None:
    """Train as a process of its own; its exit code is the command line's."""
    settle_cpu()
    summary = train(config, folder, console=QUIET)
    os._exit(0 if summary.signal is None else 128 + summary.signal)


def trained(config: RunConfig, folder: Path) -> Path:
    train(config, folder, console=QUIET)
    return folder
