"""A process that is killed, at any moment, never leaves what looks finished and is not."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from started import fork_server

from acmoe.data.folders import build_folder
from acmoe.data.text.contaminate import contaminate
from acmoe.data.text.corpus import load_corpus
from acmoe.data.text.prepare import prepare
from slow_cases import mostly_slow

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kill -9 and fork are POSIX")

OLD_TEXT, NEW_TEXT = [1, 0], [1, 3, 0]
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock"}


def killed(work: Callable[[], object], hook: Any = None, seconds: float = 0.0) -> bool:
    """Return True if a forked child was killed, by its hook or after seconds, before it ended."""
    child = os.fork()
    if not child:
        if hook:
            sys.addaudithook(hook)
        work()
        os._exit(0)
    if seconds:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


def at_step(last: int) -> Any:
    """Return a hook that kills at a step of the work on the disk, such as the n-th file opened."""
    count = 0

    def hook(event: str, arguments: object) -> None:
        nonlocal count
        if event in STEPS:
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def look(out: Path, texts: list[list[int]]) -> None:
    if out.exists():
        assert load_corpus(out, verify=True)["valid"].tolist() in texts
    for folder in (out / "contaminated").glob("rate*"):
        assert {p.name for p in folder.iterdir()} == {"manifest.json", "test.npy", "valid.npy"}


def kill_at_steps(root: Path, sender: Connection, stride: int) -> None:
    """Kill each job at each `stride`th step, and `replace` at every one: between its two renames
    lies one step only."""

    def prepare_new(out: Path) -> None:
        prepare("words", root / "new", out)

    def contaminate_old(out: Path) -> None:
        contaminate(load_corpus(out), "valid")

    jobs: dict[str, tuple[Callable[[Path], None], bool, list[list[int]]]] = {
        "prepare": (prepare_new, False, [NEW_TEXT]),
        "replace": (prepare_new, True, [OLD_TEXT, NEW_TEXT]),
        "contaminate": (contaminate_old, True, [OLD_TEXT]),
    }
    steps = {}
    for job, (work, over_old, texts) in jobs.items():
        out = root / "data" / job
        step = 1
        if over_old:
            prepare("words", root / "old", out)
        while killed(partial(work, out), at_step(step)):
            look(out, texts)
            step += 1 if job == "replace" else stride
            if job == "replace":
                prepare("words", root / "old", out)
        steps[job] = step
    sender.send(steps)


def kill_at_random_moments(root: Path, sender: Connection) -> None:
    chance = random.Random(0)
    out = root / "data"
    kills = 0
    for attempt in range(1, 13):
        seconds = attempt * chance.uniform(0.0005, 0.01)  # the first ones die early
        kills += killed(lambda: prepare("bytes", root / "text", out), seconds=seconds)
        if out.exists():
            load_corpus(out, verify=True)
            break
    sender.send(kills)


def run(attempts: Callable[..., None], folder: Path, *others: object) -> object:
    """Call `attempts` in a process without threads, which may fork; return what it sends."""
    forks = fork_server()
    receiver, sender = forks.Pipe(duplex=False)
    process = forks.Process(target=attempts, args=(folder, sender, *others))
    process.start()
    sender.close()
    if not receiver.poll(120):
        process.kill()
    process.join()
    assert process.exitcode == 0
    return receiver.recv()


@mostly_slow("stride", [7, 1])
def test_killed_at_any_step_a_folder_is_complete_or_absent_and_the_next_run_completes_it(
    stride: int, tmp_path: Path
) -> None:
    for source, valid in (("old", "the\n"), ("new", "the on\n")):
        (tmp_path / source).mkdir()
        texts = {"train": "the cat\non mats\n", "valid": valid, "test": "a\n"}
        for split, text in texts.items():
            (tmp_path / source / f"{split}.txt").write_text(text)
    steps = run(kill_at_steps, tmp_path, stride)
    assert isinstance(steps, dict) and min(steps.values()) > 20  # each `stride`th of so many
    for job in ("prepare", "replace", "contaminate"):
        out = tmp_path / "data" / job
        prepare("words", tmp_path / ("old" if job == "contaminate" else "new"), out)
        contaminate(load_corpus(out, verify=True), "valid")
    assert [path.name for path in tmp_path.rglob(".*")] == []  # no leftover of any killed run


@pytest.mark.slow
def test_killed_at_random_moments_a_large_prepare_completes_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"twelve bytes" * 2_000_000)
    kills = run(kill_at_random_moments, tmp_path)
    assert isinstance(kills, int) and kills >= 1
    prepare("bytes", tmp_path / "text", tmp_path / "data")
    corpus = load_corpus(tmp_path / "data", verify=True)
    assert sum(len(corpus[split]) for split in ("train", "valid", "test")) == 24_000_000


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_folder(tmp_path / "out", build, lambda: False)
    assert list(tmp_path.iterdir()) == []


def test_builders_of_the_same_folder_take_turns_and_build_once(tmp_path: Path) -> None:
    out, building, built = tmp_path / "out", [], []

    def build(folder: Path) -> None:
        building.append(folder)
        assert len(building) == 1, "two builders at the same time"
        time.sleep(0.1)
        (folder / "file").touch()
        built.append(building.pop())

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(build_folder, out, build, (out / "file").exists) for _ in range(4)]
    assert sorted(task.result() for task in tasks) == [False, False, False, True]
    assert len(built) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_builder_that_fails_lets_the_next_one_try(tmp_path: Path) -> None:
    out = tmp_path / "out"
    attempts: list[Path] = []

    def build(folder: Path) -> None:
        attempts.append(folder)
        time.sleep(0.05)
        if len(attempts) == 1:
            raise RuntimeError("the first fails")
        (folder / "file").touch()

    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(build_folder, out, build, (out / "file").exists) for _ in range(2)]
    errors = [task.exception() for task in tasks]
    assert sorted(str(error) for error in errors) == ["None", "the first fails"]
    assert (out / "file").exists()
