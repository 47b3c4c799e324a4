"""Fuzz target of the report's server: any bytes on a connection."""

import socket

from hypothesis import strategies as st

from faults.fuzz.common import Target
from faults.fuzz.materials import server

HOST = b"\x00HOST\x00"  # replaced by the server's own address
WORDS = st.sampled_from([b"GET", b"POST", b"HEAD", b"get", b"", b"OPTIONS", b"\xff", b"G" * 70000])
PATHS = st.sampled_from(
    [
        *(b"/", b"/version", b"/data.json", b"/version?x=1", b"//", b"/..%2f..", b"*"),
        *(b"http://x/", b"/\x00", b"/" + b"a" * 70000),
    ]
)
VERSIONS = st.sampled_from(
    [b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"HTTP/9999999.1", b"HTTP/1.1 x", b"", b"HTTP/-1.\xb2"]
)
HEADERS = st.lists(
    st.sampled_from(
        [
            *(b"Host: " + HOST, b"Host: other", b"Host", b": x", b"Connection: keep-alive"),
            *(b" folded", b"Expect: 100-continue", b"Content-Length: 99999999999"),
            *(b"Transfer-Encoding: chunked", b"X: " + b"y" * 70000, b"\xff\xfe: \xfd"),
            b"Host: " + HOST + b"\x00",
        ]
    )
    | st.binary(max_size=20),
    max_size=4,
)
ENDS = st.sampled_from([b"\r\n", b"\n", b"\r\n\r\n"])


def _request(word: bytes, path: bytes, version: bytes, headers: list[bytes], end: bytes) -> bytes:
    line = b" ".join(part for part in (word, path, version) if part)
    return b"\r\n".join([line, *headers]) + b"\r\n" + end


REQUESTS = st.binary(max_size=200) | st.builds(_request, WORDS, PATHS, VERSIONS, HEADERS, ENDS)


def _send(request: bytes) -> None:
    """The server answers in HTTP or closes; it prints no traceback and goes on answering."""
    found = server()
    host = f"127.0.0.1:{found.port}".encode()
    answer = _exchange(found.port, request.replace(HOST, host))
    # An answer to a request without a version, as in HTTP 0.9, has no status line.
    assert not answer or answer.startswith((b"HTTP/1.", b"<!", b'"', b"{", b"\n<!"))
    assert b"Traceback" not in answer
    after = _exchange(found.port, b"GET /version HTTP/1.0\r\nHost: " + host + b"\r\n\r\n")
    assert after.startswith(b"HTTP/1.0 200"), after[:80]
    errors, found.errors = found.errors, []
    if errors and errors[0] is not None:
        raise errors[0]


def _exchange(port: int, request: bytes) -> bytes:
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except TimeoutError:
            raise
        except OSError:  # closed before the request was read
            pass
    return answer


TARGETS = (Target("HTTP requests", REQUESTS, _send),)
