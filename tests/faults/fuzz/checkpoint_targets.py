"""Fuzz targets of checkpoints: files that were changed, with seals and checksums made to fit."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from rich.console import Console

from acmoe.evaluate.run import open_run, run_kind
from acmoe.models.checkpoint import load
from acmoe.report.runs import read_run
from acmoe.storage.atomic import sha256_of
from acmoe.storage.sealed import sealed_text
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.run import train
from faults.fuzz.common import (
    BYTES,
    CHANGES,
    DEEP,
    Target,
    allowed,
    changed,
    content,
    damaged,
    leaves_files,
)
from faults.fuzz.materials import fresh, run, run_config

LAST = "checkpoints/step-00000002"


def _rewrite(path: Path, changes: list[Any]) -> None:
    """Change a sealed document and seal it again."""
    document = json.loads(path.read_bytes())
    document.pop("seal", None)
    document = changed(document, changes)
    try:
        text = sealed_text(document if isinstance(document, dict) else {"x": document})
    except ValueError:  # NaN cannot be sealed
        text = json.dumps(document)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _fit(folder: Path) -> None:
    """Write the checksums of the weights and of the training tensors into the JSON files."""
    (weights,) = folder.glob("weights-*")
    for name, change in (
        ("config.json", lambda document: document.update(sha256=sha256_of(weights))),
        ("state.json", lambda document: document["files"].update(_digests(folder))),
    ):
        document = json.loads((folder / name).read_text())
        document.pop("seal")
        change(document)
        (folder / name).write_text(sealed_text(document))


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder.iterdir() if path.name != "state.json"}


def _read(folder: Path) -> None:
    """Read the last checkpoint in every way that does not write."""
    last = folder / LAST
    leaves_files(folder, lambda: load(last))
    leaves_files(folder, lambda: CheckpointStore(folder / "checkpoints", keep=2).read(last))
    leaves_files(folder, lambda: open_run(folder).model("best"))
    leaves_files(folder, lambda: read_run(folder, "run"))
    leaves_files(folder, lambda: run_kind(folder))


def _resume(folder: Path) -> None:
    """Give the command of the finished run again; no byte of a checkpoint may be lost."""
    before = {b for name, b in content(folder).items() if name.startswith("checkpoints")}
    allowed(lambda: train(run_config(), folder, console=Console(quiet=True)))
    lost = before - set(content(folder).values())
    assert not lost, "a file of a checkpoint was lost"


def _bytes(value: tuple[str, list[Any], bool]) -> None:
    """Change the bytes of a file; where its checksum is made to fit, its content is reached."""
    name, changes, fits = value
    folder = fresh(run())
    (path,) = (folder / LAST).glob(name)
    path.write_bytes(damaged(path.read_bytes(), changes))
    if fits and path.suffix == ".safetensors":
        _fit(folder / LAST)
    _read(folder)
    if fits:  # half of the values: resuming takes most of the time
        _resume(folder)


def _documents(value: tuple[str, list[Any]]) -> None:
    name, changes = value
    folder = fresh(run())
    _rewrite(folder / name, changes)
    if name == f"{LAST}/config.json":  # state.json holds its checksum
        path = folder / LAST / "state.json"
        document = json.loads(path.read_text())
        document.pop("seal")
        document["files"]["config.json"] = sha256_of(folder / name)
        path.write_text(sealed_text(document))
    _read(folder)
    if name.startswith("checkpoints"):
        _resume(folder)


def _deep(name: str) -> None:
    folder = fresh(run())
    (folder / name).write_text(DEEP)
    _read(folder)
    _resume(folder)


DOCUMENTS = (f"{LAST}/config.json", f"{LAST}/state.json", "config.json")
FILES = ("weights-*", "training.safetensors", "config.json", "state.json")

TARGETS = (
    Target("checkpoint bytes", st.tuples(st.sampled_from(FILES), BYTES, st.booleans()), _bytes),
    Target(
        "checkpoint documents",
        st.tuples(st.sampled_from(DOCUMENTS), CHANGES),
        _documents,
        kept=(
            (f"{LAST}/state.json", [(0, "set", None)]),  # the step is no number
            (f"{LAST}/state.json", [(1, "set", None)]),  # no checksums are listed
            (f"{LAST}/state.json", [(10, "set", None)]),  # the best loss is no number
            # The number of records is a list.
            (f"{LAST}/state.json", [(0, "add", [None]), (193, "set", [])]),
            ("config.json", [(142, "set", [])]),  # the length of the run is no number
        ),
    ),
    Target("deep documents", st.sampled_from(DOCUMENTS), _deep),
)
