"""Commands choose one thread for small models, and a continued run keeps its own number."""

import json
from pathlib import Path

import pytest
import torch

from acmoe.cli import main
from acmoe.config.text.language import LANGUAGE_MODELS
from acmoe.errors import UserError
from acmoe.evaluate.run import open_run
from acmoe.models.registry import model_card
from acmoe.storage.sealed import read_sealed, write_sealed
from acmoe.train import threads
from acmoe.train.threads import (
    choose_threads,
    count_model,
    saved_state,
    threads_note,
    use_threads,
    uses_onednn,
)
from tiny_runs import byte_corpus, tiny_run, trained

NANO = LANGUAGE_MODELS["switch-nano"].config
LARGE = LANGUAGE_MODELS["switch-enwik8"].config  # 36 million parameters


@pytest.fixture(autouse=True)
def without_omp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four steps, saved after the second and the fourth."""
    config = tiny_run(byte_corpus(tmp_path, 60), "steps=4", "checkpoint_every=2", "eval_every=4")
    return trained(config, tmp_path / "run")


def pretend(run: Path, **settings: object) -> None:
    """Write other settings into the run's last checkpoint."""
    path = open_run(run).checkpoint("last") / "state.json"
    state = read_sealed(path, fix="")
    write_sealed(path, {**state, **settings})


def test_a_small_model_on_a_cpu_gets_one_thread_and_a_large_one_the_default() -> None:
    assert choose_threads(None, NANO, device="cpu").number == 1
    assert "370,976 parameters" in choose_threads(None, NANO, device="cpu").message
    assert choose_threads(None, LARGE, device="cpu").number is None


def test_parameters_are_counted_as_in_the_table_of_models() -> None:
    counts = {"glam-nano": 362_264, "softmoe-nano": 897_165, "switch-enwik8": 36_076_813}
    for name, parameters in counts.items():
        assert count_model(model_card(name).config) == parameters


def test_the_option_comes_before_the_environment_and_both_before_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert choose_threads(None, NANO, device="cpu").number is None  # torch has read it
    assert choose_threads(3, NANO, device="cpu")[:2] == (3, "--threads")
    with pytest.raises(UserError, match="--threads 0; it must be at least 1"):
        choose_threads(0, NANO, device="cpu")
    with pytest.raises(UserError, match="--threads 5000; 4096 is the most"):
        choose_threads(5000, NANO, device="cpu")


def test_a_run_that_goes_on_keeps_the_number_it_was_saved_with(run: Path) -> None:
    state = saved_state(run)
    assert state is not None and state["threads"] == torch.get_num_threads()
    assert state["onednn"] == uses_onednn()
    pretend(run, threads=5, onednn=True)
    assert choose_threads(None, NANO, device="cpu", run=run).number == 5
    assert choose_threads(None, NANO, device="cpu", run=run).onednn is True
    assert choose_threads(2, NANO, device="cpu", run=run).number == 2
    assert saved_state(run.with_name("nowhere")) is None


def test_on_arm_a_small_model_goes_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    for arm, wanted in ((True, False), (False, None)):
        monkeypatch.setattr(threads, "is_arm", lambda arm=arm: arm)
        assert choose_threads(None, NANO, device="cpu").onednn is wanted
        assert choose_threads(2, NANO, device="cpu").onednn is wanted
        assert choose_threads(None, LARGE, device="cpu").onednn is None


def test_another_number_is_said_because_bits_will_differ() -> None:
    now = torch.get_num_threads()
    assert threads_note({"threads": now}) is None and threads_note({}) is None
    note = threads_note({"threads": now + 1})
    assert note is not None and "bits will differ" in note
    note = threads_note({"threads": now, "onednn": not uses_onednn()})
    assert note is not None and "oneDNN" in note


def test_use_threads_sets_torch_and_none_leaves_it() -> None:
    before, onednn = torch.get_num_threads(), uses_onednn()
    try:
        use_threads(choose_threads(before + 1, LARGE))
        assert torch.get_num_threads() == before + 1
        use_threads(choose_threads(None, LARGE, device="cpu"))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert uses_onednn() == onednn


def test_train_says_its_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = "model.dim=16 model.hidden=16 model.heads=2 model.repeats=1 model.block=16 batch=2"
    short = "steps=2 warmup=1 eval_tokens=100 data.limit=20000 device=cpu"
    with pytest.raises(SystemExit) as stop:
        main(["train", "switch-nano", *small.split(), *short.split(), "--out", "run"])
    assert stop.value.code == 0
    said = capsys.readouterr().err
    assert "run: 1 CPU thread (enough for " in said
    state = json.loads((open_run(Path("run")).checkpoint("last") / "state.json").read_text())
    assert state["threads"] == 1
