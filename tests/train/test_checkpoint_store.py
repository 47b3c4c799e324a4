"""Checkpoints are whole or absent, and the right ones are kept."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from acmoe.errors import UserError
from acmoe.models.checkpoint import load
from acmoe.models.text.decoder import LanguageModel
from acmoe.train import checkpoint
from acmoe.train.checkpoint import CheckpointStore, restoring
from acmoe.train.resume import read_latest
from tiny_runs import MODEL


def store_in(folder: Path, keep: int = 1) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep=keep)


def steps_of(store: CheckpointStore) -> list[int]:
    return [int(path.name[5:]) for path in sorted(store.folder.iterdir())]


def save(store: CheckpointStore, step: int, best: int | None = None, **state: Any) -> Path:
    tensors = {"moment": torch.full((3,), float(step))}
    document = {"best": None if best is None else {"step": best}, **state}
    return store.save(step, LanguageModel(MODEL), tensors, document)


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.latest() is None
    torch.manual_seed(0)
    folder = save(store, 7, data={"position": 3})
    tensors, state = store.read(folder)
    assert torch.equal(tensors["moment"], torch.full((3,), 7.0))
    assert (state["step"], state["data"]) == (7, {"position": 3})
    assert store.latest() == folder
    model = load(folder)
    torch.manual_seed(0)
    for name, value in LanguageModel(MODEL).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_the_latest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep=2)
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 2)):
        save(store, step, best)
    assert steps_of(store) == [2, 4, 5]
    save(store, 6, 6)
    assert steps_of(store) == [5, 6]


@pytest.mark.parametrize("moment", ["writing", "renaming", "removing"])
def test_a_crash_at_any_moment_leaves_whole_checkpoints(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    save(store, 1)

    class Crash(BaseException):
        pass

    def crash(*arguments: Any, **options: Any) -> None:
        raise Crash

    victims = {"writing": (checkpoint, "save_file"), "renaming": (checkpoint, "sync")}
    with monkeypatch.context() as broken:
        if moment == "removing":
            broken.setattr(checkpoint.shutil, "rmtree", crash)
        else:
            broken.setattr(*victims[moment], crash)
        with pytest.raises(Crash):
            save(store, 2)
    again = store_in(tmp_path)  # the next process
    latest = again.latest()
    assert latest is not None
    assert latest.name == ("step-00000002" if moment == "removing" else "step-00000001")
    again.read(latest)
    assert not [path for path in again.folder.iterdir() if path.name.startswith(".")]
    save(again, 3)
    assert steps_of(again)[-1] == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "format"])
def test_a_damaged_checkpoint_is_refused_with_a_way_out(damage: str, tmp_path: Path) -> None:
    store = store_in(tmp_path)
    folder = save(store, 1)
    file = folder / "training.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "cut":
        os.truncate(file, len(data) - 1)
    elif damage == "changed":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "gone":
        file.unlink()
    else:
        text = (folder / "state.json").read_text()
        (folder / "state.json").write_text(text.replace('"format": 2', '"format": 3'))
    with pytest.raises(UserError, match=r"delete .*step-0000"):
        store.read(folder)


@pytest.mark.parametrize("name", ["state.json", "training.safetensors"])
def test_a_checkpoint_that_cannot_be_opened_is_not_set_aside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    opened = Path.open

    def guarded(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", guarded)
    with pytest.raises((UserError, PermissionError), match="Permission denied") as stop:
        read_latest(store, store.read)
    assert "delete" not in str(stop.value)
    assert steps_of(store) == [1, 2]
    monkeypatch.undo()
    found, notes = read_latest(store, store.read)
    assert found is not None and found[1]["step"] == 2 and notes == []


def test_only_leftovers_of_this_program_are_removed(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "scratch", tmp_path / "run" / "checkpoints"
    for name in (".ssh", ".git", ".step-00000003", ".partial"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "id_ed25519").write_text("secret")
    (elsewhere / ".DS_Store").write_text("")
    (elsewhere / ".step-00000009").mkdir()
    (elsewhere / ".step-00000009" / "config.json").write_text("{}")
    (elsewhere / ".step-00000008").symlink_to(elsewhere / ".ssh")
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    CheckpointStore(folder, keep=1)
    left = {path.name for path in elsewhere.iterdir()}
    assert left == {".ssh", ".git", ".step-00000003", ".partial", ".DS_Store", ".step-00000008"}
    assert (elsewhere / ".ssh" / "id_ed25519").read_text() == "secret"


@pytest.mark.parametrize("place", ["weights", "optimizer"])
def test_a_checkpoint_with_nan_is_not_written(place: str, tmp_path: Path) -> None:
    store, model = store_in(tmp_path), LanguageModel(MODEL)
    good = save(store, 1)
    tensors = {"moment": torch.zeros(3)}
    bad = model.embed.weight if place == "weights" else tensors["moment"]
    with torch.no_grad():
        bad.view(-1)[2] = float("nan")
    name = "embed.weight" if place == "weights" else "moment"
    with pytest.raises(UserError, match=f"step 2 is not saved: {name} holds nan.*{good}"):
        store.save(2, model, tensors, {})
    assert steps_of(store) == [1]
    store.read(good)


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    good = save(store, 1)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    for victim in ("save_file", "sync", "sealed_text"):
        with monkeypatch.context() as broken:
            broken.setattr(checkpoint, victim, full)
            with pytest.raises(UserError, match="step-00000002: No space left on device; make"):
                save(store, 2)
        assert steps_of(store)[0] == 1
        if victim != "sync":
            assert [path.name for path in store.folder.iterdir()] == [good.name]
    store.read(good)


def test_a_state_of_another_run_is_not_to_be_deleted(tmp_path: Path) -> None:
    said = r"KeyError: 'positions'.*another run.*Move the folder"
    with pytest.raises(UserError, match=said), restoring(tmp_path):
        raise KeyError("positions")
