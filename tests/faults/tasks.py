"""The commands that are disturbed, each as a task in a folder, and how their results compare."""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from acmoe.config.text.finetune import FinetuneConfig
from acmoe.data.text.prepare import prepare
from acmoe.train.finetune import finetune
from tiny_runs import QUIET, byte_corpus, everything, records, tiny_run, train


class Task(Protocol):
    def __call__(self) -> None: ...


class Disturbed(NamedTuple):
    """A task of `folder`, which `make` builds, and the numbers that it leaves there."""

    prepare: Any  # (shared folder) -> materials that all repetitions share
    task: Any  # (materials, folder) -> None
    result: Any  # (folder) -> comparable numbers


def _train_config(shared: Path) -> Any:
    return tiny_run(
        byte_corpus(shared), "steps=4", "checkpoint_every=2", "log_every=1", "eval_every=2"
    )


def _train(config: Any, folder: Path) -> None:
    train(config, folder, console=QUIET)


def _train_result(folder: Path) -> Any:
    assert not list(folder.rglob(".*")), "a leftover of a failed write"
    return everything(folder), records(folder)


def _source(shared: Path) -> Path:
    source = shared / "text.txt"
    source.write_text("".join(f"{n} and {n} make {2 * n}.\n" for n in range(300)))
    return source


def _prepare(source: Path, folder: Path) -> None:
    prepare("bytes", source, folder)


def _prepare_result(folder: Path) -> Any:
    assert not list(folder.parent.glob(f".{folder.name}*")), "a leftover of a failed write"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _finetune_materials(shared: Path) -> Any:
    sentences = shared / "sst2"
    sentences.mkdir()
    for split in ("train", "dev", "test"):
        rows = "".join(f"a {'good' if n % 2 else 'bad'} film {n}\t{n % 2}\n" for n in range(12))
        (sentences / f"{split}.tsv").write_text(rows)
    run = tiny_run(byte_corpus(shared), "steps=2", "checkpoint_every=2", "eval_every=2")
    train(run, shared / "run", console=QUIET)
    return shared / "run", sentences


def _finetune(materials: Any, folder: Path) -> None:
    run, sentences = materials
    config = FinetuneConfig(task="sst2", epochs=2, batch=4, lr=1e-3, device="cpu")
    finetune(run, config, sentences, out=folder, console=QUIET)


def _finetune_result(folder: Path) -> Any:
    assert not list(folder.rglob(".*")), "a leftover of a failed write"
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    state = json.loads((last / "state.json").read_text())
    lines = [
        {key: value for key, value in json.loads(line).items() if key not in ("seconds", "crc32")}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return state["accuracies"], state["files"], lines


DISTURBED = {
    "train": Disturbed(_train_config, _train, _train_result),
    "prepare": Disturbed(_source, _prepare, _prepare_result),
    "finetune": Disturbed(_finetune_materials, _finetune, _finetune_result),
}


def task_of(name: str, materials: Any, folder: Path) -> Task:
    return partial(DISTURBED[name].task, materials, folder)
