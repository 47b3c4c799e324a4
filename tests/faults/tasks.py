"""The commands that are disturbed, each as a task in a folder, and how their results compare."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors.torch import load_file

from acmoe.config.images.attack import PGDConfig, attack_config
from acmoe.config.text.finetune import FinetuneConfig
from acmoe.data.text.prepare import prepare
from acmoe.evaluate.images.run import attack_image_run
from acmoe.evaluate.run import open_image_run
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.results.records import open_results
from acmoe.lab.study.synthetic.task import SyntheticConfig
from acmoe.lab.study.worker import run_cell
from acmoe.train.finetune import finetune
from study_cases import tiny_cells, tiny_text
from tiny_runs import QUIET, byte_corpus, everything, records, tiny_run, train
from tiny_vision_runs import tiny_vision_run, trained_images

make_folder = os.mkdir  # as it is before an injector replaces it


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


def _sharded_config(shared: Path) -> Any:
    config = _train_config(shared)
    return replace(config, parallel=replace(config.parallel, save="sharded"))


def _sharded_result(folder: Path) -> Any:
    assert not list(folder.rglob(".*")), "a leftover of a failed write"
    files = sorted(folder.glob("checkpoints/*/shards/*"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    return {name: value.numpy().tobytes() for name, value in tensors.items()}, records(folder)


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
    return state["accuracies"], state["files"], _lines(folder / "metrics.jsonl", "seconds")


def _lines(path: Path, *clock: str) -> list[Any]:
    """Read the records of a log, without their checksums and what depends on the clock."""
    found = map(json.loads, path.read_text().splitlines())
    return [
        {key: value for key, value in record.items() if key not in ("crc32", *clock)}
        for record in found
    ]


def _attack_materials(shared: Path) -> Path:
    return trained_images(tiny_vision_run("steps=2", "checkpoint_every=2"), shared / "run")


def _attack(run: Path, folder: Path) -> None:
    if not folder.exists():
        make_folder(folder)
        for name in ("config.json", "checkpoints"):
            os.symlink(run / name, folder / name)
    config = attack_config("pgd", eps=(0.02, 0.1))
    config = replace(config, attack=PGDConfig(steps=1), batch=8, limit=16)
    attack_image_run(open_image_run(folder), config, device="cpu")


def _attack_result(folder: Path) -> Any:
    assert not list(folder.rglob(".*")), "a leftover of a failed write"
    journal, report = sorted((folder / "attacks").iterdir())
    return _lines(journal), json.loads(report.read_text())


def _study_materials(shared: Path) -> list[Cell]:
    """Make a cell that saves checkpoints, and one that does not."""
    (cell,) = tiny_cells(tiny_text(shared), "adaptive-previous", steps=4)
    synthetic = SyntheticConfig(steps=2, eval_every=2, held_out=64)
    return [
        replace(cell, config=replace(cell.config, checkpoint_every=2)),
        replace(cell, study="synthetic", condition="smoe", config=synthetic, data="drawn"),
    ]


def _study(cells: list[Cell], folder: Path) -> None:
    """Run the cells that are left, in this process: faults in workers of a pool go unseen."""
    scratch = folder / "scratch"
    for new in (folder, scratch):
        if not new.exists():
            make_folder(new)
    with open_results(folder / "results.jsonl") as results:
        for cell in cells:
            if results.status(cell.digest) is None:
                results.add(run_cell(cell, scratch, lambda line: None))


def _study_result(folder: Path) -> Any:
    found = _lines(folder / "results.jsonl")
    digests = [record["digest"] for record in found]
    left = [digest for digest in digests if (folder / f"scratch/acmoe-study-{digest}").exists()]
    assert not left, "the folder of a finished cell"
    clock = ("step_ms", "train_seconds", "seconds")
    metrics = [record.pop("metrics").items() for record in found]
    return found, [{name: v for name, v in one if name not in clock} for one in metrics]


DISTURBED = {
    "train": Disturbed(_train_config, _train, _train_result),
    "train sharded": Disturbed(_sharded_config, _train, _sharded_result),
    "prepare": Disturbed(_source, _prepare, _prepare_result),
    "finetune": Disturbed(_finetune_materials, _finetune, _finetune_result),
    "attack": Disturbed(_attack_materials, _attack, _attack_result),
    "study": Disturbed(_study_materials, _study, _study_result),
}


def task_of(name: str, materials: Any, folder: Path) -> Task:
    return partial(DISTURBED[name].task, materials, folder)
