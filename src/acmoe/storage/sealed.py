"""JSON documents that carry a checksum of their own content, so that any changed byte is noticed.

A sealed document has `"format": 2` and `"seal"`, the SHA-256 of all its other fields. Version 0.1
wrote the same documents without a seal, as format 1; they are read without this check.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acmoe.errors import UserError, check
from acmoe.storage.atomic import replace_text

SEALED = 2
SEAL = "seal"

Document = dict[str, Any]


def write_sealed(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document with its seal, atomically. It must not hold NaN or infinity."""
    replace_text(path, sealed_text(document))


def sealed_text(document: Mapping[str, Any]) -> str:
    """Return the text of a sealed document."""
    content = {**document, "format": SEALED}
    return json.dumps({**content, SEAL: seal_of(content)}, indent=2, allow_nan=False) + "\n"


def read_sealed(path: Path, *, fix: str) -> Document:
    """Read a document and check its seal, which is left out; `fix` ends the error message.

    A document of format 1, or of no format, has no seal and is returned unchecked.
    """
    document = read_object(path, fix=fix)
    # One flipped bit cannot remove the seal and also turn format 2 into 1, two bits away.
    if SEAL not in document and document.get("format") != SEALED:
        return document
    seal = document.pop(SEAL, None)
    check(
        seal == seal_of(document),
        f"{path} was changed after it was written: its checksum differs; {fix}",
    )
    return document


def read_object(path: Path, *, fix: str) -> Document:
    """Read a file that holds one JSON object; raise a `UserError` where it does not."""
    check(path.is_file(), f"{path} is missing; {fix}")
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {fix}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path} is damaged, it is not JSON ({reason}); {fix}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} is damaged, it is no JSON object; {fix}")
    return document


def seal_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document's fields, written as JSON with sorted keys."""
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        return ""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
