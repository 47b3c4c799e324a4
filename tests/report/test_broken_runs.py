"""The server answers for every broken run file, and holds no thread for a silent connection."""

import contextlib
import json
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
from served import get, serving

from acmoe.report.serve import ReportServer

DEEP = b'{"config":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001

BROKEN: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[]",
    "a config that is a number": b'{"config": 1}',
    "steps that are a word": b'{"format": 1, "config": {"steps": "x"}}',
    "a seal that was removed": b'{"format": 2, "config": {"steps": 3}}',
    "a kind that is a list": b'{"format": 1, "kind": [1], "config": {"steps": 3}}',
    "nested too deeply": DEEP,
    "no text": b"\xff\xfe\x00",
}


@pytest.fixture
def run(two_runs: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_runs[1], tmp_path / "run"))


def test_every_broken_config_is_an_answer_with_a_sentence(run: Path) -> None:
    config = run / "config.json"
    whole = config.read_bytes()
    with serving(run) as server:
        for what, content in BROKEN.items():
            config.write_bytes(content)
            for path in ("/", "/data.json"):
                status, text = get(server, path)
                assert status == 500, what
                assert "the report cannot be made" in text, what
                assert "config.json" in text or "damaged" in text, (what, text)
        config.write_bytes(whole)
        assert get(server, "/data.json")[0] == 200


def test_broken_metrics_and_states_are_left_out_or_named(run: Path) -> None:
    metrics, state = run / "metrics.jsonl", run / "checkpoints" / "step-00000020" / "state.json"
    whole, sealed = metrics.read_bytes(), state.read_bytes()
    lines = (
        b"null\n",
        b'{"step": 1, "kind": [1]}\n',
        b'{"step": 1, "kind": "valid", "bits_per_byte": "x"}\n',
        b'{"step": 1, "kind": "train", "loss": ' + b"9" * 400 + b"}\n",
        b"[" * 100_000 + b"\n",
        b'{"step": 1, "kind": "train", "\\ud800": 1}\n',
    )
    with serving(run) as server:
        for line in lines:
            metrics.write_bytes(whole + line)  # no checksum: damaged, and left out
            status, text = get(server, "/data.json")
            assert status == 200 and json.loads(text)["runs"][0]["step"] == 20, line[:40]
        metrics.write_bytes(whole)
        for best in ({"step": "x"}, [1], {"loss": 1}, {"step": 10**30}, {"step": 1.5}):
            state.write_text(json.dumps({**json.loads(sealed), "best": best}))
            status, text = get(server, "/data.json")
            assert status in (200, 500), best
            assert status == 200 or "state.json" in text, (best, text)


class Impatient(ReportServer):
    connection_timeout = 0.2
    max_connections = 2


def test_silent_connections_are_closed_and_those_beyond_the_limit_refused(run: Path) -> None:
    with serving(run, Impatient) as server, contextlib.ExitStack() as stack:
        address, before = ("127.0.0.1", server.port), threading.active_count()
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(2)]
        for connection in silent:
            connection.sendall(b"GET / HT")
        while threading.active_count() < before + 2:
            time.sleep(0.005)
        status, text = get(server, "/version")
        assert status == 503 and "in use" in text
        for connection in silent:
            connection.settimeout(10)
            assert connection.recv(1) == b""  # the server hung up
        while threading.active_count() > before:
            time.sleep(0.005)
        assert get(server, "/version")[0] == 200


def test_the_limits_are_ten_seconds_and_64_connections() -> None:
    assert (ReportServer.connection_timeout, ReportServer.max_connections) == (10, 64)
