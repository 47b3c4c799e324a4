"""Parts of every fuzz target: its definition, the judge, random JSON, and mutations."""

import contextlib
import copy
import json
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from acmoe.errors import UserError

SECONDS = 30  # an example that takes longer is a hang


@dataclass(frozen=True)
class Target:
    """A use of the library that must end in success or in a `UserError` of one line.

    `kept` holds values that once ended otherwise; they are tried first, in every run.
    """

    name: str
    values: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    kept: tuple[Any, ...] = ()


class Hang(Exception):  # noqa: N818, not an error of the library
    """An example took longer than SECONDS."""


class _Alarm(BaseException):
    """Passes through every `except Exception` of the library."""


def try_value(target: Target, value: Any, seconds: float = SECONDS) -> None:
    """Check one value; raise `Hang` where it takes too long."""
    try:
        with warnings.catch_warnings(), _alarm(seconds):
            warnings.simplefilter("ignore")
            target.check(value)
    except _Alarm as alarm:
        raise Hang(f"more than {seconds} s") from alarm


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise _Alarm

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def allowed(use: Callable[[], Any]) -> Any:
    """Return the result of a use, or None for a `UserError`, whose message must be one line."""
    try:
        return use()
    except UserError as error:
        assert len(str(error).splitlines()) == 1, f"not one line: {error}"
        return None


def content(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def leaves_files(folder: Path, use: Callable[[], Any]) -> None:
    """Check a use that only reads: no file below the folder is changed, added or lost."""
    before = content(folder)
    allowed(use)
    assert content(folder) == before, "a use that reads has changed files"


NUMBERS = st.sampled_from(
    [
        *(0, -1, 1, 2, 7, 2**31, 2**63, 10**30, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308),
        *(float("nan"), float("inf"), float("-inf")),
    ]
)
TEXTS = st.text(max_size=6) | st.sampled_from(
    ["", "none", "true", "adaptive", "smoe", "name", "\n", "\x00", "../x", "a" * 5000, "\ud800"]
)
SCALARS = st.none() | st.booleans() | st.integers(-3, 300) | NUMBERS | TEXTS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
DEEP = "[" * 3000 + "]" * 3000  # deeper than Python's parser of JSON goes


# (path index, action, new value): which part of a document is changed, and how
Change = tuple[int, str, Any]
CHANGES = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from(["set", "delete", "add", "nudge"]), JSON),
    min_size=1,
    max_size=3,
)


def changed(document: Any, changes: list[Change]) -> Any:
    """Apply changes to a copy of a JSON document; indices wrap round."""
    document = copy.deepcopy(document)
    for index, action, value in changes:
        places = list(_places(document))
        if not places:
            return value
        owner, key = places[index % len(places)]
        if action == "set":
            owner[key] = value
        elif action == "delete":
            del owner[key]
        elif action == "nudge" and type(owner[key]) in (int, float):
            owner[key] = -owner[key] if index % 2 else owner[key] * 3 + 1
        elif isinstance(owner, dict):
            owner[str(value)[:20]] = value
        else:
            owner.append(value)
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value inside a document."""
    items: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        items = list(document.items())
    elif isinstance(document, list):
        items = list(enumerate(document))
    for key, value in items:
        yield document, key
        yield from _places(value)


# (kind, place, replacement): one change of the bytes of a file
BYTES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "overwrite"]),
        st.integers(0, 2**20),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    """Apply changes of bytes; places wrap round."""
    for kind, place, new in changes:
        place = place % max(1, len(content))
        if kind == "flip" and content:
            content = content[:place] + bytes([content[place] ^ new[0]]) + content[place + 1 :]
        elif kind == "cut":
            content = content[:place]
        elif kind == "insert":
            content = content[:place] + new + content[place:]
        else:
            content = content[:place] + new + content[place + len(new) :]
    return content


def json_bytes(value: Any) -> bytes:
    """Write JSON as an attacker would: NaN, lone surrogates and all."""
    return json.dumps(value).encode()
