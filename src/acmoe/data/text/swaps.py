"""Corrupt a stream of token ids: replace random words or bytes.

Words: a line with W words has max(1, floor(rate * W)) of its words replaced by AAA, drawn without
repetition among those that are not function words. With an early stop, as in the paper's tool, the
last of these swaps may be left out: this outcome is as likely as each possible place of the last
swap. A word begins with a letter or digit, so the token `@-@` has none and `U.S.` has two; a token
of which only a part was replaced is mostly unknown to the vocabulary.

Bytes: each byte is replaced independently, by another symbol with equal probabilities.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from acmoe.data.text.arrays import Tokens
from acmoe.data.text.stop_words import STOP_WORDS
from acmoe.data.text.vocabulary import ByteVocabulary, WordVocabulary
from acmoe.errors import check

REPLACEMENT = "AAA"

# A letter or digit, then any characters that continue a word: "o'clock" is one word.
_WORD = re.compile(r"[^\W_][\w'\-*@]*")

# A word inside the text of a token: its start and stop, and True if it may be swapped.
_Span = tuple[int, int, bool]


@dataclass(frozen=True, kw_only=True)
class SwapReport:
    """Counts of the replacements in one split.

    Attributes:
        tokens: tokens of the split.
        words: words the rate refers to; for bytes the same as `tokens`.
        nominal: replacements by the rate alone, before function words and the early stop reduce
            them.
        replaced: words or bytes drawn to be replaced.
        changed: tokens that differ from the clean text; an unknown word cannot change.
    """

    tokens: int
    words: int
    nominal: int
    replaced: int
    changed: int

    @property
    def word_rate(self) -> float:
        """Fraction of words replaced."""
        return self.replaced / max(self.words, 1)

    @property
    def token_rate(self) -> float:
        """Fraction of tokens that differ."""
        return self.changed / max(self.tokens, 1)


def swap_words(
    clean: Tokens,
    vocabulary: WordVocabulary,
    rate: float,
    generator: np.random.Generator,
    *,
    early_stop: bool = True,
) -> tuple[Tokens, SwapReport]:
    """Replace some words of every line; results outside the vocabulary become `<unk>`."""
    corrupted = np.array(clean)
    parsed: dict[int, list[_Span]] = {}
    words = nominal = replaced = 0
    for first, line in _lines(clean, vocabulary.eos_id):
        count, slots = 0, []
        for position, token in enumerate(line, start=first):
            if token not in parsed:
                parsed[token] = _spans(vocabulary.symbols[token])
            count += len(parsed[token])
            slots += [(position, span) for span in parsed[token] if span[2]]
        requested = max(1, int(rate * count)) if count else 0
        swaps = _draw(len(slots), requested, generator, early_stop)
        for position, spans in _by_position([slots[i] for i in swaps]).items():
            text = vocabulary.symbols[int(clean[position])]
            corrupted[position] = vocabulary.id_of(_replaced(text, spans))
        words, nominal, replaced = words + count, nominal + requested, replaced + len(swaps)
    changed = int(np.count_nonzero(corrupted != clean))
    return corrupted, SwapReport(
        tokens=len(clean), words=words, nominal=nominal, replaced=replaced, changed=changed
    )


def _lines(stream: Tokens, eos_id: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the first position and the tokens of each line, without its end-of-line token."""
    first = 0
    for end in (*np.flatnonzero(np.asarray(stream) == eos_id).tolist(), len(stream)):
        yield first, stream[first:end].tolist()
        first = end + 1


def _spans(text: str) -> list[_Span]:
    return [(m.start(), m.end(), m.group() not in STOP_WORDS) for m in _WORD.finditer(text)]


def _draw(slots: int, count: int, generator: np.random.Generator, early_stop: bool) -> list[int]:
    """Draw `count` of the slots to swap, or all where there are fewer.

    The early stop leaves out the last swap with probability 1 / (n + 1), where n is the number of
    its possible places. A line with fewer than `count` slots is never stopped early.
    """
    drawn: list[int] = np.argsort(generator.random(slots), kind="stable")[:count].tolist()
    if early_stop and 0 < count <= slots and generator.random() * (slots - count + 2) < 1:
        drawn.pop()
    return drawn


def _by_position(swaps: list[tuple[int, _Span]]) -> dict[int, list[_Span]]:
    spans = defaultdict(list)
    for position, span in swaps:
        spans[position].append(span)
    return spans


def _replaced(text: str, spans: list[_Span]) -> str:
    for start, stop, _ in sorted(spans, reverse=True):  # from the right: offsets stay valid
        text = text[:start] + REPLACEMENT + text[stop:]
    return text


def swap_bytes(
    clean: Tokens, vocabulary: ByteVocabulary, rate: float, generator: np.random.Generator
) -> tuple[Tokens, SwapReport]:
    """Replace each byte, with probability `rate`, by another symbol of the vocabulary."""
    check(
        vocabulary.size >= 2,
        "a vocabulary of one byte value has nothing to replace it by; corrupt a text of several",
    )
    corrupted = np.array(clean)
    hit = np.flatnonzero(generator.random(len(clean)) < rate)
    step = generator.integers(1, vocabulary.size, size=len(hit))  # never 0: always another symbol
    corrupted[hit] = (clean[hit].astype(np.int64) + step) % vocabulary.size
    report = SwapReport(
        tokens=len(clean),
        words=len(clean),
        nominal=round(rate * len(clean)),
        replaced=len(hit),
        changed=len(hit),
    )
    return corrupted, report
