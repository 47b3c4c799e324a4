"""Prepare the sample that the explorer shows: a part of a text, or images.

B images, C = 3 colours, Y rows and X columns of pixels.
"""

import base64
import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from acmoe.analyze.record import RoutingRecord
from acmoe.data.images.splits import ImageSet
from acmoe.data.text.corpus import Corpus
from acmoe.data.text.vocabulary import ByteVocabulary, Vocabulary

MOST_PIXELS = 112  # the largest side of an image on the page
NEWLINE, SPACE, TAB, DELETE = 10, 32, 9, 127


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The shown tokens or images. Runs with the same sample are compared token by token."""

    mark: str  # a hash that identifies the sample
    count: int  # number of tokens, or of images
    content: dict[str, Any]  # values for the page

    def items(self, grid: tuple[int, int] | None) -> int:
        """Return the number of shown rows of a layer's record: tokens, or patches of all images."""
        return self.count if grid is None else self.count * grid[0] * grid[1]


def text_sample(record: RoutingRecord, corpus: Corpus, count: int) -> Sample:
    """Return the first `count` recorded tokens as visible text."""
    assert record.token_ids is not None
    ids = record.token_ids[:count].tolist()
    vocabulary = corpus.vocabulary
    content = {
        "kind": "text",
        "title": f"{corpus.title}, test, from its beginning",
        "unit": "bytes" if isinstance(vocabulary, ByteVocabulary) else "words",
        "tokens": [visible(token, vocabulary) for token in ids],
        "breaks": [place for place, token in enumerate(ids) if token == vocabulary.eos_id],
    }
    # Two runs may show different lengths of one text, so the mark covers its beginning only.
    mark = _mark(repr((content["title"], content["unit"], content["tokens"][:64])))
    return Sample(mark=mark, count=len(ids), content=content)


def visible_tokens(record: RoutingRecord, corpus: Corpus) -> list[str]:
    """Return all recorded tokens as visible text."""
    assert record.token_ids is not None
    return [visible(token, corpus.vocabulary) for token in record.token_ids.tolist()]


def pieces_sample(pieces: Sequence[str], title: str) -> Sample:
    """Return tokens that are given as pieces of a text, with their spaces."""
    content = {
        "kind": "text",
        "title": f"{title}, from its beginning",
        "unit": "tokens",
        "tokens": [visible_piece(piece) for piece in pieces],
        "breaks": [place for place, piece in enumerate(pieces) if "\n" in piece],
    }
    mark = _mark(repr((content["title"], content["unit"], content["tokens"][:64])))
    return Sample(mark=mark, count=len(pieces), content=content)


def visible_piece(piece: str) -> str:
    """Replace characters that cannot be seen; a token may also hold no character of its own."""
    signs = {"\n": "\u23ce", "\t": "\u21e5", "\x7f": "\u2421"}
    shown = (signs.get(one, chr(0x2400 + ord(one)) if ord(one) < SPACE else one) for one in piece)
    return "".join(shown) or "\u2205"


def visible(token: int, vocabulary: Vocabulary) -> str:
    """Return a word as it is, and a byte as a visible character."""
    if not isinstance(vocabulary, ByteVocabulary):
        return "\u23ce" if token == vocabulary.eos_id else vocabulary.symbols[token]
    value = vocabulary.values[token]
    signs = {NEWLINE: "\u23ce", TAB: "\u21e5", DELETE: "\u2421"}
    if value in signs:
        return signs[value]
    if value < SPACE:
        return chr(0x2400 + value)  # Unicode's symbols for control characters
    return chr(value) if value < DELETE else f"{value:02X}"  # part of a UTF-8 sequence, in hex


def image_sample(record: RoutingRecord, images: ImageSet, count: int) -> Sample:
    """Return the first `count` recorded images, reduced to the size of the page."""
    assert record.pixels is not None and record.labels is not None
    pixels_BCYX = record.pixels[:count]
    names = images.classes
    labels = [names[label] for label in record.labels[:count].tolist()]
    shown = [
        {"src": png_uri(pixels_CYX), "label": label}
        for pixels_CYX, label in zip(pixels_BCYX, labels, strict=True)
    ]
    content = {
        "kind": "images",
        "title": f"{images.title}, test",
        "unit": "patches",
        "images": shown,
    }
    return Sample(mark=_mark(repr(shown)), count=len(shown), content=content)


def png_uri(pixels_CYX: Tensor) -> str:
    """Encode an image with values in [0, 1] as a data URI, averaging pixels if it is too large."""
    shrink = -(-pixels_CYX.shape[-1] // MOST_PIXELS)
    if shrink > 1:
        pixels_CYX = functional.avg_pool2d(pixels_CYX[None], shrink)[0]
    levels_YXC = (pixels_CYX.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
    return "data:image/png;base64," + base64.b64encode(_png(levels_YXC)).decode()


def _png(levels_YXC: Tensor) -> bytes:
    """Encode an 8-bit RGB image as PNG, with filter type 0 for every row."""
    height, width, _ = levels_YXC.shape
    rows = b"".join(b"\0" + row_XC.numpy().tobytes() for row_XC in levels_YXC.contiguous())

    def chunk(name: bytes, content: bytes) -> bytes:
        check_sum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check_sum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
