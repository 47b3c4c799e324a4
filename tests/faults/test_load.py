"""Memory, open files and threads do not grow with steps, generated tokens and requests.

`make test` runs a short version. The full one prints its figures:

    pytest -s -m faults tests/faults/test_load.py
    ACMOE_LOAD=2000,1000,1000 pytest -s -m faults tests/faults/test_load.py    # other sizes
"""

import gc
import http.client
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from acmoe.evaluate.run import open_run
from acmoe.report.routing import RoutingReader
from acmoe.report.serve import LiveReport, ReportServer
from acmoe.train.text import TextTrainer
from tiny_runs import byte_corpus, tiny_run, trained

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

STEPS, TOKENS, REQUESTS = map(int, os.environ.get("ACMOE_LOAD", "20000,10000,10000").split(","))
# Bytes that a process may gain after the first tenth; allocators keep freed memory in pools. In the
# full run a leak of 1 KiB a step, token or request is 9 to 18 MiB and is noticed.
MOST_GROWTH = 8 * 2**20
SMALLEST = ("model.repeats=2", "model.dim=8", "model.hidden=8", "batch=1", "split=1")


def sizes(quick: int, full: int) -> list[Any]:
    """Parametrize with a quick size and, for `-m faults`, the full one."""
    return [quick, pytest.param(full, marks=pytest.mark.faults)]


class Usage(NamedTuple):
    """Resources of this process."""

    memory: int  # resident bytes
    handles: int  # open files and sockets
    threads: int

    @classmethod
    def now(cls) -> "Usage":
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        handles, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), handles, threads)


class Samples:
    """Calls `add` once per event, and samples the usage after a tenth of them and at the last."""

    def __init__(self, events: int) -> None:
        self.events, self.count = events, 0
        self.found: list[Usage] = []

    def add(self) -> None:
        self.count += 1
        if self.count in (max(1, self.events // 10), self.events):
            self.found.append(Usage.now())

    def check(self, what: str, last: Usage | None = None) -> None:
        """Print both samples and compare them."""
        early, late = self.found[0], last or self.found[-1]
        assert self.count == self.events
        first, second = (usage.memory / 2**20 for usage in (early, late))
        print(
            f"{self.events:,} {what}, after a tenth and at the end: memory {first:.1f} and "
            f"{second:.1f} MiB, handles {early.handles} and {late.handles}, threads "
            f"{early.threads} and {late.threads}"
        )
        assert late.memory - early.memory < MOST_GROWTH
        assert late.handles <= early.handles and late.threads <= early.threads


@pytest.mark.parametrize("steps", sizes(20, STEPS))
def test_training(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples(steps)
    update = TextTrainer.update

    def counted(*arguments: Any, **options: Any) -> Any:
        samples.add()
        return update(*arguments, **options)

    monkeypatch.setattr(TextTrainer, "update", counted)
    often = (f"checkpoint_every={max(10, steps // 20)}", f"eval_every={max(30, steps // 20)}")
    config = tiny_run(
        byte_corpus(tmp_path, lines=60), f"steps={steps}", *SMALLEST, *often, "eval_tokens=40"
    )
    started = time.perf_counter()
    trained(config, tmp_path / "run")
    print(f"{1000 * (time.perf_counter() - started) / steps:.2f} ms a step")
    samples.check("steps")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    config = tiny_run(byte_corpus(folder, lines=60), "steps=2", "eval_every=2", *SMALLEST)
    return trained(config, folder / "run")


@pytest.mark.parametrize("tokens", sizes(30, TOKENS))
def test_generation(tokens: int, run: Path) -> None:
    samples = Samples(tokens)
    model = open_run(run).model("last").eval()
    model.blocks[0].register_forward_hook(lambda *_: samples.add())
    found = model.generate(torch.tensor([[65, 66, 67]]), tokens, temperature=1.0, seed=0)
    assert found.shape == (1, tokens)
    samples.check("tokens")


@pytest.mark.parametrize("requests", sizes(60, REQUESTS))
def test_serving(requests: int, run: Path) -> None:
    samples = Samples(requests)
    report = LiveReport([run], RoutingReader(tokens=8, device="cpu"))
    with ReportServer(report, 0) as server:
        loop = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        loop.start()
        try:
            for number in range(requests):
                path = ("/", "/data.json", "/none")[number // 25 % 3]
                status = get(server.port, path if number % 25 == 0 else "/version")
                assert status == (404 if number % 25 == 0 and path == "/none" else 200)
                samples.add()
            early = samples.found[0]
            settled = wait_for(lambda: Usage.now().threads <= early.threads)
            samples.check("requests", settled)
        finally:
            server.shutdown()
            loop.join()


def get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def wait_for(condition: Callable[[], bool]) -> Usage:
    """Wait up to 5 s for the thread of the last request to end; return the usage then."""
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return Usage.now()
