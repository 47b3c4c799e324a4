"""Serve the page over HTTP on the loopback address, and update it while runs train."""

import contextlib
import hashlib
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from acmoe.errors import UserError, check, typed_line
from acmoe.evaluate.run import ATTACKS, CHECKPOINTS, METRICS
from acmoe.evaluate.saved import EVALUATIONS
from acmoe.evaluate.starts import STARTS
from acmoe.report.content import report_data
from acmoe.report.page import escaped_json, render
from acmoe.report.routing import RoutingReader
from acmoe.report.runs import ROUTING, find_runs

LOOPBACK = "127.0.0.1"
WATCHED = (
    *("config.json", METRICS, "lock", f"{CHECKPOINTS}/step-*", f"{ATTACKS}/report-*.json"),
    *(EVALUATIONS, STARTS, "shift*.json", "../comparison.json", ROUTING),
)

_SENTENCE = b"All connections of this server are in use; close some pages, or try again.\n"
_BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Retry-After: 1\r\nContent-Length: %d\r\n\r\n%b" % (len(_SENTENCE), _SENTENCE)
)


class LiveReport:
    """Page data of some runs, recomputed when one of their files has changed."""

    def __init__(self, folders: Sequence[Path], reader: RoutingReader) -> None:
        self.folders = find_runs(folders)
        self.reader = reader
        self._lock = threading.Lock()
        self._made: tuple[str, dict[str, Any]] | None = None

    def version(self) -> str:
        """Hash the names, times and sizes of the watched files. This is cheap."""
        seen = []
        for folder in self.folders:
            for pattern in WATCHED:
                for path in sorted(folder.glob(pattern)):
                    try:
                        found = path.stat()
                    except OSError:  # the checkpoint was just replaced
                        continue
                    seen.append(f"{path} {found.st_mtime_ns} {found.st_size}")
        return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]

    def data(self) -> dict[str, Any]:
        """Return the page's data, with the version they were computed at."""
        with self._lock:  # one computation at a time, since each loads models
            version = self.version()
            if self._made is None or self._made[0] != version:
                data = report_data(self.folders, self.reader)
                self._made = (version, {**data, "version": version})
            return self._made[1]


class _Request(io.RawIOBase):
    """The bytes of one request, which must all arrive within `seconds`.

    A timeout of the socket alone starts again with every byte, so that a client that sends one from
    time to time would hold its thread for ever.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection, self.end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: "ReportServer"

    def setup(self) -> None:
        """Read through `_Request` instead of the socket's own file."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Request(self.connection, self.server.connection_timeout))

    def parse_request(self) -> bool:
        """Parse the request, then give the answer, which may be an error, its own time."""
        parsed = super().parse_request()
        self.connection.settimeout(self.server.connection_timeout)
        return parsed

    def do_GET(self) -> None:
        # Another site may resolve its host name to this machine (DNS rebinding); refuse it.
        if self.headers.get("Host") not in self.server.hosts:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "not served under this host name")
            return
        path = self.path.partition("?")[0]
        try:
            if path == "/":
                self._send("text/html", render(self.server.report.data(), live=True))
            elif path == "/version":
                self._send("application/json", json.dumps(self.server.report.version()))
            elif path == "/data.json":
                self._send("application/json", escaped_json(self.server.report.data()))
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the reader has gone
        except Exception as error:  # a damaged run must not end the connection without an answer
            failed = HTTPStatus.INTERNAL_SERVER_ERROR
            reason = str(error) if isinstance(error, UserError) else _damage(error)
            self.send_error(failed, "the report cannot be made", reason)

    def _send(self, kind: str, text: str) -> None:
        content = text.encode("utf-8")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that the terminal stays free for training."""


def _damage(error: Exception) -> str:
    """Describe an error that only a damaged file causes."""
    kind = typed_line(error)
    return f"a file of a run is damaged, or was changed by hand ({kind}); restore it"


class ReportServer(ThreadingHTTPServer):
    """HTTP server that listens on the loopback address only.

    Each connection has a thread. With `max_connections` open, a further one is answered with 503.
    """

    daemon_threads = True
    connection_timeout = 10.0  # seconds for a whole request, and again for sending the answer
    max_connections = 64

    def __init__(self, report: LiveReport, port: int) -> None:
        check(0 <= port <= 65535, f"--port {port} is no port; choose 1024 to 65535, 0 for any free")
        self.report = report
        self._free = threading.BoundedSemaphore(self.max_connections)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(
                f"--port {port} cannot be used: {error.strerror}; choose another, 0 for any free"
            ) from error
        self.port = self.server_address[1]
        self.hosts = {f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or refuse at once where all threads are in use."""
        if self._free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # the thread did not start
                self._free.release()
                raise
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)  # a new socket has room for these few bytes
            request.sendall(_BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection, then let another one in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a client that has gone; other errors are printed with a traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/"
