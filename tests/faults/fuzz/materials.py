"""A run, its corpus and a server for the fuzz targets, made once in each process."""

import atexit
import shutil
import tempfile
import threading
from functools import cache
from pathlib import Path

from acmoe.config.text.train import RunConfig
from acmoe.report.routing import RoutingReader
from acmoe.report.serve import LiveReport, ReportServer
from tiny_runs import byte_corpus, tiny_run, trained


@cache
def home() -> Path:
    """Return a temporary folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="acmoe-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def run_config() -> RunConfig:
    short = ("steps=2", "checkpoint_every=1", "log_every=1", "eval_every=1", "eval_tokens=40")
    small = ("model.repeats=2", "model.dim=8", "model.hidden=8", "batch=2", "split=1")
    return tiny_run(byte_corpus(home(), lines=40), *short, *small)


@cache
def run() -> Path:
    """Return a finished run with checkpoints after steps 1 and 2."""
    return trained(run_config(), home() / "run")


def corpus() -> Path:
    run_config()
    return home() / "corpus"


def fresh(source: Path, name: str = "used") -> Path:
    """Return a new copy of a folder; the copy before it is removed."""
    used = home() / name
    shutil.rmtree(used, ignore_errors=True)
    return Path(shutil.copytree(source, used))


def empty(name: str = "used") -> Path:
    """Return a new, empty folder."""
    used = home() / name
    shutil.rmtree(used, ignore_errors=True)
    used.mkdir()
    return used


class LoudServer(ReportServer):
    """Collects what a server prints with a traceback."""

    connection_timeout = 2.0

    def handle_error(self, request: object, client_address: object) -> None:
        import sys

        error = sys.exception()
        if not isinstance(error, OSError):
            self.errors.append(error)

    errors: list[BaseException | None]


@cache
def server() -> LoudServer:
    """Return a server of the run, in a thread that ends with the process."""
    found = LoudServer(LiveReport([run()], RoutingReader(tokens=8, device="cpu")), 0)
    found.errors = []
    threading.Thread(target=found.serve_forever, daemon=True).start()
    return found
