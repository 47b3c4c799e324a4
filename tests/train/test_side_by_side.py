"""Two runs in two processes: equal bits, one console, and one end for both."""

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.errors import UserError
from acmoe.train.display import Display, Screen
from acmoe.train.side_by_side import processes
from acmoe.train.side_by_side.processes import (
    Job,
    Outcome,
    _Event,
    _outcomes,
    _RemoteScreen,
    _Worker,
    run_job,
    run_one_by_one,
    run_side_by_side,
)
from acmoe.train.signals import StopSignals
from acmoe.train.threads import Threads
from tiny_runs import QUIET, byte_corpus, everything, records, tiny_run

ONE = Threads(1, "a test")


class FakeProcess:
    exitcode = -9

    def join(self, timeout: float) -> None:
        """Return at once: there is no process."""


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    corpus = byte_corpus(tmp_path, 60)
    return [
        Job(
            config=tiny_run(corpus, "steps=4", "eval_every=4", router=router),
            folder=tmp_path / router,
            score=EvaluateConfig(),
            note="1 thread",
        )
        for router in ("smoe", "adaptive")
    ]


def workers_of(jobs: list[Job]) -> tuple[list[_Worker], list[Any]]:
    """Workers without processes, and the pipes that their processes would hold."""
    pipes = [Pipe() for _ in jobs]
    workers = [
        _Worker(job, FakeProcess(), ours) for job, (ours, _) in zip(jobs, pipes, strict=True)
    ]
    return workers, [theirs for _, theirs in pipes]


def test_a_job_sends_its_lines_and_its_scores(jobs: list[Job]) -> None:
    text = io.StringIO()
    with Display("smoe", 4, Console(file=text, width=200), note=jobs[0].note) as display:
        expected = run_job(jobs[0], display, StopSignals())
    assert "smoe: 1 thread\n" in text.getvalue() and "nats" in text.getvalue()
    workers, (pipe, _) = workers_of(jobs)
    remote = _RemoteScreen(pipe, live=False)
    remote.say("a line")
    remote.send("done", expected)
    shown = io.StringIO()
    workers[1].ended = True
    (found,) = _outcomes(workers, Screen(Console(file=shown)), StopSignals())
    assert shown.getvalue() == "a line\n"
    assert found == expected
    assert found.report is not None and found.report.figure().tokens > 0


def test_where_one_fails_the_other_is_asked_to_stop_and_the_error_is_raised(
    jobs: list[Job],
) -> None:
    workers, (failing, other) = workers_of(jobs)
    failing.send(_Event("failed", (UserError("lr=9 is too high"),)))

    def answer() -> None:
        other.send(_Event("done", (Outcome(None, None),)))  # type: ignore[arg-type]

    screen = Screen(QUIET)
    asked: list[int] = []
    workers[1].stop = lambda number: (asked.append(number), answer())  # type: ignore[assignment]
    with pytest.raises(UserError, match="lr=9 is too high"):
        _outcomes(workers, screen, StopSignals())
    assert asked == [signal.SIGTERM]


def test_a_process_that_dies_is_an_error_with_its_exit_code(jobs: list[Job]) -> None:
    workers, (pipe, _) = workers_of(jobs)
    workers[1].ended = True
    pipe.close()
    with pytest.raises(ChildProcessError, match=r"trains .*smoe ended with code -9"):
        _outcomes(workers, Screen(QUIET), StopSignals())


def test_a_parent_that_is_gone_does_not_end_a_run_before_it_is_saved(jobs: list[Job]) -> None:
    ours, theirs = Pipe()
    ours.close()
    remote = _RemoteScreen(theirs, live=True)
    for _ in range(3):
        remote.advance("smoe", 1, 2)  # no BrokenPipeError


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(jobs: list[Job], tmp_path: Path) -> None:
    alone = [
        Job(config=job.config, folder=tmp_path / "alone" / job.folder.name, score=job.score)
        for job in jobs
    ]
    # Here tests use BLAS for matrix products; a process of its own would use oneDNN on ARM.
    code = (
        "import pickle, sys, torch; torch.set_num_threads(1)\n"
        "from acmoe.train.side_by_side.processes import run_one_by_one\n"
        "run_one_by_one(pickle.load(sys.stdin.buffer), None)"
    )
    subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(alone), check=True, capture_output=True
    )
    outcomes = run_side_by_side(jobs, QUIET, ONE)
    assert [one.summary.step for one in outcomes] == [4, 4]
    for job, other in zip(jobs, alone, strict=True):
        assert everything(job.folder) == everything(other.folder)
        assert records(job.folder) == records(other.folder)


@pytest.mark.slow
def test_ctrl_c_saves_both_and_the_same_command_continues(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "acmoe", "demo", "--steps", "100000", "--out", "demo"]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as it:
        wait_for(lambda: len(list(tmp_path.glob("demo/*/metrics.jsonl"))) == 2)
        os.killpg(it.pid, signal.SIGINT)  # as a terminal does: all processes of the group
        assert it.stderr is not None
        assert it.wait(timeout=60) == 128 + signal.SIGINT
        last = it.stderr.read().splitlines()[-1]
    assert last.startswith("acmoe: interrupted; smoe at step ") and "acmoe at step " in last
    assert len(list(tmp_path.glob("demo/*/checkpoints/step-*"))) == 2


@pytest.mark.slow
def test_a_failing_run_stops_the_other_with_its_message(jobs: list[Job]) -> None:
    bad = tiny_run(Path(jobs[0].config.data.folder), "lr=1e30", "clip=none", "steps=4000")
    long = tiny_run(Path(jobs[0].config.data.folder), "steps=100000", "eval_every=100000")
    both = [
        Job(config=bad, folder=jobs[0].folder, score=jobs[0].score),
        Job(config=long, folder=jobs[1].folder, score=jobs[1].score),
    ]
    with pytest.raises(UserError, match="not finite"):
        run_side_by_side(both, QUIET, ONE)
    assert list(jobs[1].folder.glob("checkpoints/step-*"))


def wait_for(ready: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_one_by_one_ends_at_the_first_run_that_a_signal_stops(jobs: list[Job]) -> None:
    class Stopped(StopSignals):
        def __enter__(self) -> "Stopped":
            self.received = signal.SIGINT
            return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "StopSignals", Stopped)
        (only,) = run_one_by_one(jobs, QUIET)
    assert only.report is None and only.summary.step == 1
