"""The live page: on this machine only, and new when a run has moved on."""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import get, serving

from acmoe.errors import UserError
from acmoe.report.serve import ReportServer
from acmoe.storage.lines import append_line


@pytest.fixture
def run(two_runs: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_runs[1], tmp_path / "run"))


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with serving(run) as found:
        yield found


def test_the_page_comes_with_its_version_and_data(server: ReportServer) -> None:
    status, page = get(server, "/")
    assert status == 200
    assert "connect-src 'self'" in page
    _, version = get(server, "/version")
    _, data = get(server, "/data.json")
    assert json.loads(data)["version"] == json.loads(version)


def test_the_version_changes_with_the_metrics_and_so_do_the_data(
    server: ReportServer, run: Path
) -> None:
    before, data = get(server, "/version")[1], json.loads(get(server, "/data.json")[1])
    assert get(server, "/version")[1] == before
    append_line(run / "metrics.jsonl", {"kind": "valid", "step": 21, "bits_per_byte": 0.5})
    assert get(server, "/version")[1] != before
    fresh = json.loads(get(server, "/data.json")[1])
    assert data["runs"][0]["step"] == 20
    assert fresh["runs"][0]["step"] == 21
    assert fresh["runs"][0]["best"] == {"step": 21, "value": 0.5}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", ""])
def test_other_host_names_are_refused(server: ReportServer, host: str) -> None:
    for path in ("/", "/version", "/data.json"):
        status, text = get(server, path, host.format(port=server.port))
        assert status == 421
        assert "runs" not in text


def test_localhost_is_this_machine_too(server: ReportServer) -> None:
    assert get(server, "/version", f"localhost:{server.port}")[0] == 200


def test_nothing_else_is_served(server: ReportServer) -> None:
    for path in ("/config.json", "/../config.json", "/metrics.jsonl", "/page.html"):
        assert get(server, path)[0] == 404


def test_it_listens_on_the_loopback_address_alone(server: ReportServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_run_that_broke_is_an_error_and_not_an_end(server: ReportServer, run: Path) -> None:
    config = (run / "config.json").read_text()
    (run / "config.json").write_text("{")
    status, text = get(server, "/data.json")
    assert status == 500
    assert "is damaged" in text
    (run / "config.json").write_text(config)
    assert get(server, "/data.json")[0] == 200


def test_a_port_in_use_is_one_line(server: ReportServer, run: Path) -> None:
    with pytest.raises(UserError, match=f"--port {server.port} cannot be used"):
        ReportServer(server.report, server.port)
    with pytest.raises(UserError, match="--port 70000 is no port"):
        ReportServer(server.report, 70000)


def test_a_client_that_sends_a_byte_from_time_to_time_is_closed(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "connection_timeout", 0.3)
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
        slow.settimeout(0.05)
        closed = False
        while not closed and time.monotonic() - started < 5:
            try:
                slow.sendall(b"G")  # never a whole line
                closed = slow.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                closed = True
    # Each byte comes well within the 0.3 s, so only a limit for the whole request can end it.
    assert closed and 0.25 < time.monotonic() - started < 3
    assert get(server, "/version")[0] == 200
