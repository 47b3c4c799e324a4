"""The benchmark of the host's time, on a CPU."""

import time

import pytest
import torch

from acmoe.errors import UserError
from acmoe.lab.bench.harness.options import BOTH, FORWARD
from acmoe.lab.bench.harness.table import cells
from acmoe.lab.bench.layers import host
from acmoe.lab.bench.layers.host import HostConfig, QueueClock, bench_host


def test_every_mode_is_timed_without_and_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "QUEUED", 1)
    config = HostConfig(shapes=("8x8x8x4x2-relu",), tokens=(3,), repeat=2, device="cpu")
    report = bench_host(config)
    modes, parts = ("plain", "running", "batch"), (FORWARD, "training forward", BOTH)
    wanted = [("8x8x8x4x2-relu@3", mode, part) for mode in modes for part in parts]
    assert [(row["shape"], row["mode"], row["part"]) for row in report.rows] == wanted
    for row in report.rows:
        assert 0 < row["us_low"] <= row["us"] <= row["us_high"]
    row = report.rows[2] | {"us": 1234.4, "us_low": 1000.0, "us_high": 2000.6}
    report.rows[:] = [row]
    assert cells(report) == [["8x8x8x4x2-relu@3", "plain", "f+b", "1,234 (1,000-2,001)"]]


def test_forward_alone_times_the_calls_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "QUEUED", 1)
    shapes = ("8x8x8x4x2-relu",)
    report = bench_host(HostConfig(shapes=shapes, repeat=2, device="cpu", forward=True))
    modes = ("plain", "running", "batch")
    assert [(row["mode"], row["part"]) for row in report.rows] == [(m, FORWARD) for m in modes]
    assert report.kind == "host-forward"


def test_a_time_is_the_mean_of_ten_calls() -> None:
    calls = []

    def action() -> None:
        calls.append(time.sleep(0.002))

    found = QueueClock(torch.device("cpu")).measure(action)
    assert len(calls) == 10 and 2 <= found < 20  # milliseconds


def test_a_graph_has_no_host_time() -> None:
    with pytest.raises(UserError, match="graph=True"):
        HostConfig(graph=True)
