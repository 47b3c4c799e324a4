"""Train language models side by side, each in a process of its own, and score them.

The processes share nothing, so each run equals, bit by bit, the one that a single process with the
same number of threads makes.
"""

import io
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.config.text.train import RunConfig
from acmoe.errors import UserError, typed_line
from acmoe.evaluate.language import evaluate
from acmoe.evaluate.language_report import LanguageReport
from acmoe.evaluate.saved import save_evaluation
from acmoe.train.display import Display, Screen
from acmoe.train.freed_memory import keep_freed_memory
from acmoe.train.run import Summary, train_with
from acmoe.train.signals import STOP, StopSignals
from acmoe.train.threads import Threads, use_threads

# A process that has used CUDA or has threads must not be forked.
_SPAWN = multiprocessing.get_context("spawn")
POLL = 0.2  # seconds between two looks at the stop signals


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to train, and how to score it on the test text."""

    config: RunConfig
    folder: Path
    score: EvaluateConfig
    note: str = ""  # a line for the log


class Outcome(NamedTuple):
    """The result of a job; it has no report where a signal stopped the training."""

    summary: Summary
    report: LanguageReport | None


class _Event(NamedTuple):
    """A message from a process: call the screen's method `name`, or end the job."""

    name: str  # say, advance, progress, done or failed
    arguments: tuple[Any, ...]


def run_job(job: Job, display: Display, signals: StopSignals) -> Outcome:
    """Train to the end or a stop signal; then score the run, and save the report in its folder."""
    summary = train_with(job.config, job.folder, display, signals)
    if summary.signal is not None:
        return Outcome(summary, None)
    screen, title = display.screen, display.title
    report = evaluate(
        job.folder,
        job.score,
        device=job.config.device,
        progress=lambda stage, *amounts: screen.progress(f"{title}, {stage}", *amounts),
    )
    save_evaluation(job.folder, report.to_json())
    return Outcome(summary, report)


def run_one_by_one(jobs: Sequence[Job], console: Console | None) -> list[Outcome]:
    """Run the jobs in this process; after a stop signal, return those that were begun."""
    outcomes: list[Outcome] = []
    for job in jobs:
        with Display(job.folder.name, job.config.steps, console, note=job.note) as display:
            outcomes.append(run_job(job, display, StopSignals()))
        if outcomes[-1].report is None:
            break
    return outcomes


def run_side_by_side(
    jobs: Sequence[Job], console: Console | None, threads: Threads
) -> list[Outcome]:
    """Run the jobs at once, each in a process with these settings of the CPU.

    The first stop signal lets every process save and end; a second one kills them. Where one job
    fails, the others save and end, and its error is raised.
    """
    with (
        Screen(console) as screen,
        StopSignals() as signals,
        _started(jobs, threads, screen.live) as workers,
    ):
        return _outcomes(workers, screen, signals)


@dataclass
class _Worker:
    job: Job
    process: Any  # a process of the spawn context
    pipe: Connection
    outcome: Outcome | None = None
    ended: bool = False

    def stop(self, number: int) -> None:
        """Ask the process to save and end, as if it had received this signal."""
        with suppress(OSError):
            self.pipe.send(number)


@contextmanager
def _started(jobs: Sequence[Job], threads: Threads, live: bool) -> Iterator[list[_Worker]]:
    """Start a process for each job; kill those that still run at the end of `with`."""
    workers: list[_Worker] = []
    try:
        for job in jobs:
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_work, args=(job, threads, live, theirs), daemon=True)
            with _ignoring_stop_signals():  # the process inherits this, from its first moment on
                process.start()
            theirs.close()  # the pipe then closes when the process ends
            workers.append(_Worker(job, process, ours))
        yield workers
    finally:
        for worker in workers:
            if not worker.ended:
                worker.process.kill()
            worker.process.join(timeout=30)
            worker.pipe.close()


@contextmanager
def _ignoring_stop_signals() -> Iterator[None]:
    """Ignore the stop signals inside `with`; Python lets only the main thread do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcomes(workers: list[_Worker], screen: Screen, signals: StopSignals) -> list[Outcome]:
    """Show what the processes send until all have ended; raise the first error among them."""
    failure: Exception | None = None
    asked = False
    while running := [worker for worker in workers if not worker.ended]:
        if not asked and (signals.received is not None or failure is not None):
            asked = True
            for worker in running:
                worker.stop(signals.received or signal.SIGTERM)
        ready = wait([worker.pipe for worker in running], timeout=POLL)
        for worker in running:
            if worker.pipe in ready:
                error = _read(worker, screen)
                failure = failure or error
    if failure is not None:
        raise failure
    return [worker.outcome for worker in workers if worker.outcome is not None]


def _read(worker: _Worker, screen: Screen) -> Exception | None:
    """Handle one message; return the error of a process that failed."""
    try:
        event: _Event = worker.pipe.recv()
    except (EOFError, OSError):
        worker.ended = True
        worker.process.join(timeout=30)
        return ChildProcessError(
            f"the process that trains {worker.job.folder} ended with code "
            f"{worker.process.exitcode}; give the same command again to continue"
        )
    if event.name == "done":
        worker.outcome, worker.ended = event.arguments[0], True
    elif event.name == "failed":
        worker.ended = True
        error = event.arguments[0]
        assert isinstance(error, Exception)
        return error
    else:
        getattr(screen, event.name)(*event.arguments)
    return None


class _RemoteScreen(Screen):
    """Sends everything to the screen of the parent process."""

    def __init__(self, pipe: Connection, live: bool) -> None:
        super().__init__(Console(file=io.StringIO()))
        self.pipe, self.live = pipe, live

    def send(self, name: str, *arguments: Any) -> None:
        """Send a message. A parent that is gone does not keep the run from being saved."""
        with suppress(OSError):
            self.pipe.send(_Event(name, arguments))

    def say(self, text: str) -> None:
        self.send("say", text)

    def advance(self, title: str, done: int, total: int, figures: str = "") -> None:
        self.send("advance", title, done, total, figures)

    def progress(self, stage: str, done: int, total: int) -> None:
        self.send("progress", stage, done, total)


def _work(job: Job, threads: Threads, live: bool, pipe: Connection) -> None:
    """Run a job in a process of its own, and send its outcome."""
    for number in STOP:  # a terminal sends them to all processes; the parent passes them on
        signal.signal(number, signal.SIG_IGN)
    use_threads(threads)
    keep_freed_memory()
    signals = StopSignals()
    signals.listens = False
    threading.Thread(target=_await_stop, args=(pipe, signals), daemon=True).start()
    display = Display(job.folder.name, job.config.steps, note=job.note)
    screen = display.screen = _RemoteScreen(pipe, live)
    try:
        screen.send("done", run_job(job, display, signals))
    except (UserError, OSError) as error:
        screen.send("failed", error)
    except Exception as error:
        traceback.print_exception(error)
        text = typed_line(error)
        screen.send("failed", ChildProcessError(f"training {job.folder} failed: {text}"))


def _await_stop(pipe: Connection, signals: StopSignals) -> None:
    """Stop the run when the parent asks for it, or is gone."""
    number: int = signal.SIGTERM
    with suppress(EOFError, OSError):
        number = pipe.recv()
    signals.received = number
