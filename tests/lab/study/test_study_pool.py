"""Cells in processes of their own: done, failed, killed, resumed, out of time."""

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from started import fork_server

from acmoe.lab.study import pool
from acmoe.lab.study.cell import NoTests
from acmoe.lab.study.pool import run_cells, threads_per_worker
from acmoe.lab.study.results.records import open_results, read_results
from study_cases import tiny_cells, tiny_text


@dataclass(frozen=True)
class Deadly:
    """A config whose worker is killed as soon as it looks for the device."""

    @property
    def device(self) -> str:
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return "cpu"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny_text(tmp_path_factory.mktemp("study"))


@pytest.fixture
def quick_workers(monkeypatch):
    """Workers forked by a server that has imported torch: `spawn` takes seconds for each."""
    monkeypatch.setattr(pool, "_SPAWN", fork_server())


def test_failed_and_killed_cells_are_written_down_and_do_not_stop_the_others(
    text, tmp_path, quick_workers
):
    (good,) = tiny_cells(text, "adaptive-previous")
    wrong = replace(
        good,
        condition="wrong",
        config=replace(good.config, model=replace(good.config.model, vocab_size=7)),
    )
    killed = replace(good, condition="killed", config=Deadly(), tests=NoTests())
    path, seen = tmp_path / "results.jsonl", []
    with open_results(path) as results:
        tally = run_cells(
            [wrong, killed, good],
            results,
            origin={"options": "--steps 4"},
            on_event=lambda cell, event, text: seen.append((cell.condition, event)),
        )
    assert (tally.done, tally.failed, tally.left) == (1, 2, 0)
    first, second, third = read_results(path)
    assert first["status"] == "failed"
    assert "model.vocab_size=7" in first["error"]
    assert second["error"] == "its process ended with -9"
    assert third["status"] == "done"
    assert third["options"] == "--steps 4"
    expected = {"test", "contaminated", "test_running", "valid", "load_balance", "instability"}
    assert expected <= third["metrics"].keys()
    assert third["metrics"]["scale_rms_log"] > 0
    assert [step for step, _ in third["curves"]["valid"]] == [1, 2, 3, 4]
    assert {"layers", "scale", "scored"} <= third["details"].keys()
    assert ("killed", "failed") in seen
    assert ("adaptive-previous", "progress") in seen


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads Linux's list of processes")
def test_a_killed_study_leaves_no_worker_and_goes_on_where_it_was(text, tmp_path):
    cells = tiny_cells(text, "smoe", "control", "adaptive-previous", steps=60)
    path = tmp_path / "results.jsonl"
    parent = multiprocessing.get_context("spawn").Process(target=run_all, args=(cells, path))
    parent.start()
    deadline = time.monotonic() + 120
    while not (path.is_file() and path.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = workers_of(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    while any(alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children
    assert not any(alive(child) for child in children)
    before = len(read_results(path))
    assert 1 <= before < 3
    run_all(cells, path)
    assert [line["status"] for line in read_results(path)] == ["done"] * 3


def run_all(cells, path):
    with open_results(path) as results:
        left = [cell for cell in cells if results.status(cell.digest) is None]
        run_cells(left, results)


def workers_of(pid):
    """Children of a process, as the kernel lists them."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def test_without_time_no_cell_is_begun(text, tmp_path):
    cells = tiny_cells(text, "smoe", "control")
    with open_results(tmp_path / "results.jsonl") as results:
        tally = run_cells(cells, results, minutes=0.0)
    assert (tally.done, tally.failed, tally.left) == (0, 0, 2)


def test_workers_share_the_cores_unless_the_user_chose(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_per_worker(4) is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert threads_per_worker(5) == 3
    assert threads_per_worker(32) == 1
