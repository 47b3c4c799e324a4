"""An interrupted run, continued, is the uninterrupted run: bit by bit, and with no line twice."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_updates import stop_at
from started import fork_server

from acmoe.cli import main
from acmoe.config.text.train import RunConfig
from acmoe.data.text.corpus import load_corpus
from acmoe.data.text.prepare import prepare
from acmoe.errors import UserError
from acmoe.evaluate.language import evaluate
from acmoe.evaluate.run import open_run
from acmoe.train.run import train
from acmoe.train.text import TextTrainer
from tiny_runs import (
    QUIET,
    byte_corpus,
    everything,
    records,
    tiny_run,
    train_in_child,
    trained,
    word_corpus,
)

# Children are forked from a server that has imported everything but started no thread.
FORKS = fork_server()


def child(config: RunConfig, folder: Path) -> Any:
    process = FORKS.Process(target=train_in_child, args=(config, folder))
    process.start()
    return process


@pytest.mark.parametrize(
    "overrides",
    [
        ("steps=15",),  # running statistics, dropout, memory of two micro-batches
        pytest.param(
            ("model.router.statistics=prefix", "schedule=cosine", "clip=0.5", "weight_decay=0.1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(  # frozen after step 1
            ("model.router=stable", "steps=15"), marks=pytest.mark.slow
        ),
        pytest.param(  # draws a scale in every call
            ("model.router=random", "split=1"), marks=pytest.mark.slow
        ),
        pytest.param(
            ("model.router=smoe", "model.router.bias_balancing=0.01", "model.empty_memory=zeros"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda overrides: " ".join(overrides) or "adaptive",
)
def test_stopped_at_5_and_continued_equals_one_run(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 472 training bytes make 4 rows of 118, that is 7 blocks a pass: step 6 continues step 5.
    config = tiny_run(byte_corpus(tmp_path, lines=20), *overrides)
    trained(config, tmp_path / "whole")
    stop_at(TextTrainer, [5], monkeypatch)
    first = train(config, tmp_path / "parts", console=QUIET)
    assert (first.step, first.signal) == (5, signal.SIGTERM)
    assert "same command" in first.message
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6}\n{"kind": "tra')  # as a killed process leaves it
    second = train(config, tmp_path / "parts", console=QUIET)
    # Offsets of later passes are drawn, and memories begin again with each.
    assert everything(tmp_path / "whole")["data"]["passes"] >= 2
    assert (second.step, second.signal) == (config.steps, None)
    assert everything(tmp_path / "whole") == everything(tmp_path / "parts")
    assert records(tmp_path / "whole") == records(tmp_path / "parts")


def test_the_best_checkpoint_outlives_interruptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(byte_corpus(tmp_path), "eval_every=4")
    stop_at(TextTrainer, [5, 7], monkeypatch)
    for step in (5, 7):
        assert train(config, tmp_path / "run", console=QUIET).step == step
        run = open_run(tmp_path / "run")
        assert run.checkpoint("last").name == f"step-0000000{step}"
        assert run.checkpoint("best").name == "step-00000004"
        run.model("best")


def test_two_runs_of_one_config_are_equal_and_another_seed_differs(tmp_path: Path) -> None:
    corpus = byte_corpus(tmp_path)
    first, second, third = (
        records(trained(tiny_run(corpus, "steps=4", f"seed={seed}"), tmp_path / name))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == second
    assert first != third


def test_training_leaves_the_callers_random_stream_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(tiny_run(byte_corpus(tmp_path), "steps=2"), tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)


def test_sigterm_finishes_the_step_saves_and_says_so(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "steps=5000", "checkpoint_every=5000")
    process = child(config, tmp_path / "run")
    wait_for(process, lambda: len(lines_of(tmp_path / "run")) >= 2)
    process.terminate()
    process.join(60)
    assert process.exitcode == 143
    reached = int(open_run(tmp_path / "run").checkpoint("last").name.split("-")[1])
    # Only the signal can have saved this: checkpoints were not due for 5000 steps.
    assert 8 <= reached < 5000


# One kill in the default run: tests/faults/test_fault_points.py.
@pytest.mark.slow
@pytest.mark.parametrize(("kills", "steps"), [(1, 16), (5, 40)])
def test_killed_at_random_moments_it_ends_with_the_same_weights(
    kills: int, steps: int, tmp_path: Path
) -> None:
    config = tiny_run(byte_corpus(tmp_path), f"steps={steps}", "checkpoint_every=2", "log_every=3")
    trained(config, tmp_path / "whole")
    moments = random.Random(0)
    checkpoints = tmp_path / "killed" / "checkpoints"

    def reached() -> int:
        return max((int(folder.name[5:]) for folder in checkpoints.glob("step-*")), default=0)

    for _ in range(kills):
        before, wanted = reached(), moments.choice((1, 2, 4))
        process = child(config, tmp_path / "killed")
        wait_for(process, lambda: reached() >= before + wanted)  # noqa: B023, called at once
        time.sleep(moments.uniform(0.0, 0.1))  # a step and its checkpoint take about 0.05 s
        process.kill()
        process.join()
        for folder in checkpoints.glob("step-*"):
            names = {file.name.split("-")[0] for file in folder.iterdir()}
            assert names == {"config.json", "weights", "training.safetensors", "state.json"}
        assert before < reached()  # what was saved is never lost
    assert reached() < config.steps
    trained(config, tmp_path / "killed")
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob(".*"))  # no leftover of a killed write


def test_a_folder_in_use_is_refused_with_the_process_that_holds_it(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "steps=100000")
    process = child(config, tmp_path / "run")
    wait_for(process, lambda: len(lines_of(tmp_path / "run")) >= 1)
    try:
        with pytest.raises(UserError, match=f"in use by process {process.pid}"):
            train(config, tmp_path / "run", console=QUIET)
    finally:
        process.kill()
        process.join()


def test_another_config_is_refused_with_the_settings_that_differ(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "steps=2")
    trained(config, tmp_path / "run")
    other = tiny_run(tmp_path / "corpus", "steps=2", "lr=0.5", "model.router=smoe")
    with pytest.raises(UserError, match=r"lr=0.01, not 0.5") as refusal:
        train(other, tmp_path / "run", console=QUIET)
    assert "model.router.name=adaptive, not smoe" in str(refusal.value)
    assert "another folder" in str(refusal.value)


def test_another_corpus_in_the_same_place_is_refused(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path, lines=100), "steps=2")
    trained(config, tmp_path / "run")
    byte_corpus(tmp_path, lines=101)
    with pytest.raises(UserError, match="not the corpus this run was begun with"):
        train(config, tmp_path / "run", console=QUIET)


def test_another_vocabulary_is_refused_and_the_runs_own_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many words in another order: every figure of the run would be of shuffled words."""
    corpus = word_corpus(tmp_path)
    size = load_corpus(corpus).vocabulary.size
    config = tiny_run(corpus, "steps=2", "data.name=words", f"model.vocab_size={size}")
    trained(config, tmp_path / "run")
    saved = (tmp_path / "run" / "vocabulary.json").read_bytes()
    train_text = tmp_path / "words" / "train.txt"
    train_text.write_text("house dogs " + train_text.read_text())
    prepare("words", tmp_path / "words", corpus)
    assert load_corpus(corpus).vocabulary.size == size
    with pytest.raises(UserError, match="begun with another vocabulary than its corpus has now"):
        train(config, tmp_path / "run", console=QUIET)
    assert (tmp_path / "run" / "vocabulary.json").read_bytes() == saved
    with pytest.raises(UserError, match=r"has another vocabulary than .* was trained with"):
        evaluate(tmp_path / "run", device="cpu")
    with pytest.raises(SystemExit) as stop:  # a text needs the run's vocabulary alone
        main(["generate", str(tmp_path / "run"), "--prompt", "the owl", "--tokens", "2"])
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out[:8]) == (0, "the owl ")
    assert "the run does not know owl, and reads <unk> instead" in printed.err


def test_another_training_text_in_the_same_place_is_told_to_readers(tmp_path: Path) -> None:
    trained(tiny_run(byte_corpus(tmp_path, lines=100), "steps=2"), tmp_path / "run")
    open_run(tmp_path / "run").corpus()
    byte_corpus(tmp_path, lines=101)
    with pytest.warns(UserWarning, match=r"holds another training text than .* was trained on"):
        open_run(tmp_path / "run").corpus()


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(UserError, match=r"holds cat.png and is no run folder"):
        train(config, tmp_path / "photos", console=QUIET)
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.png"]


def test_settings_that_the_corpus_refuses_may_be_corrected_in_the_same_folder(
    tmp_path: Path,
) -> None:
    corpus = byte_corpus(tmp_path)
    with pytest.raises(UserError, match="do not fit: lower batch or block"):
        train(tiny_run(corpus, "batch=1000"), tmp_path / "run", console=QUIET)
    assert train(tiny_run(corpus, "steps=2"), tmp_path / "run", console=QUIET).step == 2


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "steps=4")
    trained(config, tmp_path / "run")
    before = everything(tmp_path / "run"), records(tmp_path / "run")
    summary = train(config, tmp_path / "run", console=QUIET)
    assert (summary.step, summary.best_step) == (4, 4)
    assert (everything(tmp_path / "run"), records(tmp_path / "run")) == before


def wait_for(process: Any, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.005)


def lines_of(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.is_file() else []
