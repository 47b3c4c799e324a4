"""Damage one file of a run or of its corpus, use both as a user would, and judge what came out."""

import io
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from acmoe.config.text.train import RunConfig
from acmoe.data.text.corpus import load_corpus
from acmoe.data.text.prepare import prepare
from acmoe.errors import UserError
from acmoe.evaluate.run import checkpoints, open_run
from acmoe.models.checkpoint import load
from acmoe.report.runs import read_run
from acmoe.train.run import train
from tiny_runs import byte_corpus, everything, records, tiny_run

Said = list[str]
CLOCK = ("seconds", "tokens_per_second")


@dataclass(frozen=True)
class Found:
    """The result of using a folder, and the messages that the user saw."""

    value: Any  # None: it was refused
    said: Said


@dataclass(frozen=True)
class Case:
    """A finished run, one that was stopped before its last checkpoint, and their corpus."""

    home: Path  # source.txt, corpus/, finished/ and stopped/; used, damaged and restored
    whole: Path  # the same, untouched
    config: RunConfig
    expected: dict[str, dict[str, Any]]  # by run, then by use

    def files(self) -> list[tuple[str, Path]]:
        """List each file with the run that is used after it is damaged."""
        found = []
        for run in ("finished", "stopped"):
            for top in (run, "corpus"):
                inside = (path for path in sorted((self.whole / top).rglob("*")) if path.is_file())
                found += [(run, path.relative_to(self.whole)) for path in inside]
        return found

    def restore(self) -> None:
        """Undo every change; a corpus has the path that its runs were begun with."""
        shutil.rmtree(self.home)
        shutil.copytree(self.whole, self.home)


def make_case(folder: Path) -> Case:
    """Train 6 steps with checkpoints after 2, 4 and 6; the stopped run lacks the last one."""
    home = folder / "home"
    home.mkdir()
    config = tiny_run(
        byte_corpus(home, lines=60),
        *("steps=6", "checkpoint_every=2", "log_every=1", "eval_every=2", "keep=3"),
    )
    train(config, home / "finished", console=Console(quiet=True))
    shutil.copytree(home / "finished", home / "stopped")
    shutil.rmtree(home / "stopped/checkpoints/step-00000006")
    case = Case(home, folder / "whole", config, {})
    shutil.copytree(home, case.whole)
    for run in ("finished", "stopped"):
        uses = use_all(home, run, config)
        assert not [one for one in uses.values() if one.value is None or one.said], uses
        case.expected[run] = {name: one.value for name, one in uses.items()}
        case.restore()
    assert case.expected["finished"]["resume"] == case.expected["stopped"]["resume"]
    return case


def mutate(path: Path, rng: random.Random) -> str:
    """Flip a random bit of a file, or cut it off at a random place; say what was done.

    Half of the cuts in a text are between two lines, where the rest still looks whole.
    """
    content = bytearray(path.read_bytes())
    if rng.random() < 0.7:
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        content[place] ^= 1 << bit
        done = f"bit {bit} of byte {place} flipped"
    else:
        ends = [place + 1 for place, byte in enumerate(content[:-1]) if byte == ord("\n")]
        between = ends and path.suffix in (".json", ".jsonl") and rng.random() < 0.5
        place = rng.choice(ends) if between else rng.randrange(len(content))
        del content[place:]
        done = f"cut off after {place} bytes"
    path.write_bytes(content)
    return done


def use_all(
    home: Path, run: str, config: RunConfig, *, read_only: bool = False
) -> dict[str, Found]:
    """Use the folders in every way; resuming and preparing, which write, come last."""
    folder = home / run
    uses: dict[str, Callable[[Said], Any]] = {
        "report": lambda said: _report(folder, said),
        "metrics": lambda said: _without_clock(open_run(folder).metrics("train")),
        "best": lambda said: _weights(open_run(folder).model("best")),
        "checkpoints": lambda said: [
            _weights(load(one)) for one in checkpoints(folder / "checkpoints")
        ],
        "vocabulary": lambda said: open_run(folder).vocabulary(),
        "corpus": lambda said: _tokens(home / "corpus"),
    }
    if not read_only:
        uses["resume"] = lambda said: _resumed(home, run, config, said)
        uses["prepare"] = lambda said: _prepared(home)
    return {name: _used(use) for name, use in uses.items()}


def _used(use: Callable[[Said], Any]) -> Found:
    """Use a folder; any error but a `UserError` is a failure of the test."""
    said: Said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = use(said)
        except UserError as error:
            value = None
            said.append(str(error))
    return Found(value, [*said, *(str(one.message) for one in caught)])


def _report(folder: Path, said: Said) -> Any:
    facts = read_run(folder, "run")
    said += facts.notes
    return _without_clock([*facts.train, *facts.valid])


def _without_clock(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: v for key, v in line.items() if key not in CLOCK} for line in lines]


def _weights(model: nn.Module) -> Any:
    state = model.state_dict()
    tensors = {name: v for name, v in state.items() if isinstance(v, Tensor)}
    extra = {
        f"{key}:{name}": tensor
        for key, values in state.items()
        if isinstance(values, dict)
        for name, tensor in values.items()
    }
    named = {name: v.numpy().tobytes() for name, v in {**tensors, **extra}.items()}
    return named, repr(model.config)


def _tokens(folder: Path) -> Any:
    corpus = load_corpus(folder)
    streams = {split: stream.tobytes() for split, stream in corpus.streams.items()}
    return corpus.manifest, corpus.vocabulary, streams


def _resumed(home: Path, run: str, config: RunConfig, said: Said) -> Any:
    """Train to the end; note every line that is not about the progress."""
    text = io.StringIO()
    try:
        train(config, home / run, console=Console(file=text, width=10_000))
    finally:
        lines = text.getvalue().splitlines()
        said += [line for line in lines if not line.startswith(f"{run}: ")]
    return everything(home / run), records(home / run)


def _prepared(home: Path) -> Any:
    prepare("bytes", home / "source.txt", home / "corpus")
    return {path.name: path.read_bytes() for path in sorted((home / "corpus").iterdir())}
