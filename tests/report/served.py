"""Serve the live page of a run in a thread, and read from it."""

import contextlib
import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

from acmoe.report.routing import RoutingReader
from acmoe.report.serve import LiveReport, ReportServer


@contextlib.contextmanager
def serving(
    run: Path, server: type[ReportServer] = ReportServer, *, tokens: int = 16
) -> Iterator[ReportServer]:
    """Serve the page of a run as long as `with` lasts; its explorer shows that many tokens."""
    report = LiveReport([run], RoutingReader(tokens=tokens, device="cpu"))
    with server(report, 0) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


def get(server: ReportServer, path: str, host: str | None = None) -> tuple[int, str]:
    """Return the status and text of an answer; `host` replaces the header of that name."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
