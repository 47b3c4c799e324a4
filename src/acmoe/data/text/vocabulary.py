"""Vocabularies that map text to token ids and back, at word level and at byte level."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from acmoe.errors import UserError, check

EOS = "<eos>"  # end of line; trained and scored like any other token
UNK = "<unk>"
NEWLINE, QUESTION_MARK = 10, 63

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class WordVocabulary:
    """Whitespace-separated, case-sensitive words; `<eos>` is token 0 and encodes a newline."""

    symbols: tuple[str, ...]
    kind: ClassVar[Literal["words"]] = "words"

    def __post_init__(self) -> None:
        first = self.symbols[:1]
        check(
            first == (EOS,),
            f"the first word of a vocabulary must be {EOS}, not {first}; put it there",
        )
        check(UNK in self.ids, f"a word vocabulary must hold {UNK}; add it")
        if len(self.ids) < len(self.symbols):
            twice = Counter(self.symbols).most_common(1)[0][0]
            raise UserError(f"a word vocabulary holds {twice!r} twice; give each word once")

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.symbols)}

    @property
    def size(self) -> int:
        return len(self.symbols)

    @property
    def eos_id(self) -> int:
        return 0

    @property
    def unk_id(self) -> int:
        return self.ids[UNK]

    def id_of(self, word: str) -> int:
        """Return the token id of a word, or that of `<unk>` for an unknown word."""
        return self.ids.get(word, self.unk_id)

    def encode(self, text: str) -> Ids:
        """Encode a text; each newline becomes `<eos>`, and each unknown word `<unk>`."""
        words = text.replace("\n", f" {EOS} ").split()
        return np.array([self.id_of(word) for word in words], dtype=np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Join the words by spaces, with `<eos>` as a newline; `encode` inverts this."""
        ids = _checked_ids(tokens, self.size)
        return " ".join("\n" if i == self.eos_id else self.symbols[i] for i in ids.tolist())


@dataclass(frozen=True)
class ByteVocabulary:
    """Byte values in ascending order: token i is the i-th value. A newline is an ordinary byte.

    EnWik-8 has the published vocabulary of the 205 values that it uses. Other corpora have all 256,
    so that any text can be encoded.
    """

    values: bytes
    kind: ClassVar[Literal["bytes"]] = "bytes"

    def __post_init__(self) -> None:
        check(
            len(self.values) > 0 and list(self.values) == sorted(set(self.values)),
            f"a byte vocabulary has the values {list(self.values)}; give ascending byte values "
            "without repeats",
        )

    @property
    def size(self) -> int:
        return len(self.values)

    @property
    def eos_id(self) -> int | None:
        """The token id of a newline; None where the vocabulary has none."""
        position = self.values.find(NEWLINE)
        return None if position < 0 else position

    @cached_property
    def lookup(self) -> NDArray[np.int16]:
        """(256,) token id of each byte value; unknown values get that of `?`, or -1 without one."""
        lookup = np.full(256, self.values.find(QUESTION_MARK), dtype=np.int16)
        lookup[np.frombuffer(self.values, dtype=np.uint8)] = np.arange(self.size)
        return lookup

    def encode(self, text: str) -> Ids:
        """Encode the UTF-8 bytes of a text; values outside the vocabulary become `?`."""
        return self.encode_bytes(text.encode("utf-8", errors="surrogateescape"))

    def encode_bytes(self, data: bytes) -> Ids:
        ids = self.lookup[np.frombuffer(data, dtype=np.uint8)].astype(np.int64)
        unknown = np.flatnonzero(ids < 0)
        check(
            unknown.size == 0,
            f"byte 0x{data[unknown[0]] if unknown.size else 0:02x} is not among the"
            f" {self.size} values of this vocabulary, nor is the question mark to stand for it;"
            " leave it out of the text",
        )
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode to UTF-8 text; an incomplete character becomes the replacement character."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        return np.frombuffer(self.values, dtype=np.uint8)[_checked_ids(tokens, self.size)].tobytes()


Vocabulary = WordVocabulary | ByteVocabulary


def _checked_ids(tokens: Iterable[int], size: int) -> Ids:
    ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), dtype=np.int64)
    wrong = ids[(ids < 0) | (ids >= size)]
    check(
        wrong.size == 0,
        f"token {wrong[0] if wrong.size else 0} is outside the vocabulary of {size} symbols;"
        f" pass ids from 0 to {size - 1}",
    )
    return ids


def save_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """Write the vocabulary as JSON: its kind, and its words or byte values in order of token id."""
    symbols: list[Any]
    if isinstance(vocabulary, WordVocabulary):
        symbols = list(vocabulary.symbols)
    else:
        symbols = list(vocabulary.values)
    data = {"kind": vocabulary.kind, "symbols": symbols}
    path.write_text(json.dumps(data, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def load_vocabulary(path: Path) -> Vocabulary:
    """Read what `save_vocabulary` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["kind"] == "words":
            return WordVocabulary(tuple(str(symbol) for symbol in data["symbols"]))
        if data["kind"] == "bytes":
            return ByteVocabulary(bytes(data["symbols"]))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; give the file of a prepared corpus or of a run"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no vocabulary ({error}); prepare the corpus again") from error
    raise UserError(
        f"{path}: kind {data['kind']!r} is neither words nor bytes; prepare the corpus again"
    )
