"""Checkpoints that every process writes a part of, in a single process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import acmoe
from acmoe.config.text.train import RunConfig
from acmoe.distributed.ranks import ALONE
from acmoe.distributed.staging import Staging
from acmoe.errors import UserError
from acmoe.evaluate.run import checkpoints
from acmoe.storage.shards import Writing, read_shards, stored_tensors
from acmoe.train.run import train
from acmoe.train.text.memory import resplit
from slow_cases import mostly_slow
from tiny_runs import QUIET, byte_corpus, records, tiny_run

FILE = "shard-00001-model-00001-of-00001.safetensors"
SHARDED = "parallel.save=sharded"
SHORT = ("steps=6", "log_every=1", "eval_every=3", "checkpoint_every=3", "keep=3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one run saved in each of the three ways."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    corpus = byte_corpus(folder / "text")
    for how in ("whole", "sharded", "async"):
        train(tiny_run(corpus, *SHORT, f"parallel.save={how}"), folder / how, console=QUIET)
    return folder


def half_of(run: Path, other: Path) -> None:
    """Copy a run as it was at step 3."""
    shutil.copytree(run, other)
    shutil.rmtree(other / "checkpoints" / "step-00000006")


@pytest.mark.parametrize("how", ["sharded", "async"])
def test_a_model_of_parts_is_the_model_in_one_file(runs: Path, how: str, tmp_path: Path) -> None:
    for part, whole in zip(
        checkpoints(runs / how / "checkpoints"),
        checkpoints(runs / "whole" / "checkpoints"),
        strict=True,
    ):
        assert not list(part.glob("*.safetensors"))
        loaded, expected = acmoe.load(part), acmoe.load(whole)
        torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)
        acmoe.save(loaded, tmp_path / part.name)
        (one,) = (tmp_path / part.name).glob("*.safetensors")
        (other,) = whole.glob("weights-*.safetensors")
        assert one.name == other.name  # named by the digest of the content


# Quick: to one file, and from it to parts.
@mostly_slow(
    ("before", "after"),
    [(before, after) for after in ("whole", "sharded", "async") for before in ("whole", "sharded")],
    keep={1, 4},
)
def test_a_run_continues_bit_by_bit_in_each_way(
    runs: Path, before: str, after: str, tmp_path: Path
) -> None:
    half_of(runs / before, tmp_path / "run")
    config = tiny_run(runs / "text/corpus", *SHORT, f"parallel.save={after}")
    train(config, tmp_path / "run", console=QUIET)
    losses = [record["loss"] for record in records(tmp_path / "run")]
    assert losses == [record["loss"] for record in records(runs / "whole")]
    found = [
        acmoe.load(run / "checkpoints" / "step-00000006")
        for run in (tmp_path / "run", runs / "whole")
    ]
    torch.testing.assert_close(found[0].state_dict(), found[1].state_dict(), rtol=0, atol=0)


def test_a_damaged_part_is_set_aside(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "sharded", tmp_path / "run")
    (file,) = (tmp_path / "run" / "checkpoints" / "step-00000006" / "shards").iterdir()
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"shards is damaged: its checksum"):
        acmoe.load(file.parent.parent)
    config = tiny_run(runs / "text/corpus", *SHORT, SHARDED)
    train(config, tmp_path / "run", console=QUIET)
    assert (tmp_path / "run" / "checkpoints" / "step-00000006.damaged-1").is_dir()
    assert records(tmp_path / "run")[-1]["loss"] == records(runs / "whole")[-1]["loss"]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """The header of the only file says that its tensor begins at row 4; rows 0 to 3 are missing."""
    where = {"a": {"saved_offsets": [4, 0]}}
    save_file({"a": torch.ones(4, 2)}, tmp_path / FILE, {"DCP_SHARDING_INFO": json.dumps(where)})
    with pytest.raises(UserError, match="holds 8 of the 16 numbers of a"):
        stored_tensors(tmp_path)


def test_tensors_may_change_while_their_copies_are_written(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    writing = Writing(tmp_path, Staging(ALONE).copy({"a": tensor}))
    tensor.zero_()
    writing.wait()
    found = torch.empty(1000)
    read_shards(tmp_path, {"a": found})
    assert torch.equal(found, torch.arange(1000.0))


def test_streams_are_dealt_to_other_micro_batches_in_order() -> None:
    rows = torch.arange(12.0).view(12, 1)
    saved = {f"memory/{part}/0": chunk for part, chunk in enumerate(rows.chunk(3))}
    found = resplit(saved, 2)
    assert set(found) == {"memory/0/0", "memory/1/0"}
    assert torch.equal(torch.cat([found["memory/0/0"], found["memory/1/0"]]), rows)
    assert resplit(saved, 3) is saved


def test_another_split_continues_the_same_streams(runs: Path, tmp_path: Path) -> None:
    """Two micro-batches have the gradients of one: the plain router has no statistics of them."""

    def config(split: int) -> RunConfig:
        settings = (*SHORT, "model.dropout=0", "model.balance=0", f"split={split}", SHARDED)
        return tiny_run(runs / "text/corpus", *settings, router="smoe")

    train(config(1), tmp_path / "one", console=QUIET)
    half_of(tmp_path / "one", tmp_path / "two")
    train(config(2), tmp_path / "two", console=QUIET)
    losses = ([record["loss"] for record in records(tmp_path / name)] for name in ("one", "two"))
    assert next(losses) == pytest.approx(next(losses), abs=1e-5)
