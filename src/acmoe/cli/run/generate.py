"""`acmoe generate RUN --prompt TEXT`: continue a text with a trained language model."""

import codecs
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import tyro
from rich.console import Console
from torch import Tensor

from acmoe.cli.arguments.shared import Device, Json
from acmoe.cli.run.options import Threads, Which, run_threads
from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from acmoe.data.text.vocabulary import Vocabulary

SHOW_EVERY = 0.1  # seconds between pieces of text; reading a token waits for the device


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text, token by token, with the KV cache and the routing cache.

    The text is printed while it is generated. Ctrl-C ends it early and keeps what is there.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    prompt: str
    """The text to continue."""
    tokens: int = 200
    """Number of new tokens."""
    temperature: float = 1.0
    """Sampling temperature; 0 always takes the likeliest token, whatever the other options of
    sampling are."""
    top_k: int | None = None
    """Sample from the k likeliest tokens; all if not given."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together hold this probability; all if not given."""
    seed: int = 0
    """Seed of the sampling."""
    which: Which = "best"
    device: Device = "auto"
    threads: Threads = None
    json: Json = False

    def run(self) -> int:
        from acmoe.errors import NonFiniteError, check
        from acmoe.evaluate.run import open_run
        from acmoe.runtime import pick_device

        check(self.tokens >= 1, f"--tokens {self.tokens}; it must be at least 1")
        device = pick_device(self.device)
        run = open_run(self.folder)
        run_threads(self.threads, self.folder, self.device)
        vocabulary = run.vocabulary()
        ids = list(vocabulary.encode(self.prompt))
        check(bool(ids), f"prompt={self.prompt!r} holds no token; give at least one")
        if unknown := unknown_parts(self.prompt, vocabulary):
            print(
                f"the run does not know {', '.join(unknown)}, and reads "
                f"{'?' if vocabulary.kind == 'bytes' else '<unk>'} instead",
                file=sys.stderr,
            )
        model = run.model(self.which, device=device).eval()
        text = GeneratedText(self.prompt, vocabulary, self.tokens, shown=not self.json)
        try:
            model.generate(
                torch.tensor([ids], device=device),
                self.tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=self.seed,
                on_token=text.add,
            )
        except NonFiniteError:
            text.end_line()
            raise
        except KeyboardInterrupt:
            self._end(text)
            raise KeyboardInterrupt(f"{text.count:,} of {self.tokens:,} tokens are there") from None
        self._end(text)
        return 0

    def _end(self, text: "GeneratedText") -> None:
        """Print what is not printed yet."""
        text.end()
        if self.json:
            document = {"prompt": self.prompt, "text": "".join(text.pieces)}
            print(json_text(document, indent=None), flush=True)


class GeneratedText:
    """The text of the tokens generated so far; with `shown` it is printed as it grows.

    The pieces join to `vocabulary.decode` of all tokens. If the text does not appear on a terminal,
    lines on stderr say how far it is.
    """

    def __init__(
        self, prompt: str, vocabulary: "Vocabulary", most_tokens: int, *, shown: bool
    ) -> None:
        from acmoe.data.progress import ProgressLines, silent

        self.vocabulary, self.most_tokens, self.shown = vocabulary, most_tokens, shown
        self.count = 0
        self.pieces: list[str] = []
        self._new: list[Tensor] = []  # (1,) tokens that are not decoded yet
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._due = time.monotonic()
        visible = shown and sys.stdout.isatty()
        self._progress = silent if visible else ProgressLines(Console(stderr=True))
        # The prompt is printed with the first token, so that a refused option prints no text.
        self._before = prompt + ("" if vocabulary.kind == "bytes" else " ")

    def add(self, token_1: Tensor) -> None:
        """Take the next token."""
        self._new.append(token_1)
        if time.monotonic() >= self._due:
            self._decode()
            self._due = time.monotonic() + SHOW_EVERY

    def end(self) -> None:
        """Decode and show the rest."""
        self._decode(final=True)
        self._show("\n")

    def end_line(self) -> None:
        """End the line of the text that is shown, if there is any, and show no more."""
        if self.pieces:
            self._show("\n")

    def _decode(self, *, final: bool = False) -> None:
        ids = torch.cat(self._new).tolist() if self._new else []
        self._new.clear()
        self.count += len(ids)
        self.pieces.append(self._piece(ids, final))
        self._show(self.pieces[-1])
        self._progress("tokens", self.count, self.most_tokens)

    def _piece(self, ids: Sequence[int], final: bool) -> str:
        if self.vocabulary.kind == "bytes":  # a character may end in the next piece
            return self._utf8.decode(self.vocabulary.decode_bytes(ids), final)
        begins = " " if ids and any(self.pieces) else ""
        return begins + self.vocabulary.decode(ids)

    def _show(self, text: str) -> None:
        if self.shown:
            sys.stdout.write(self._before + text)
            sys.stdout.flush()
            self._before = ""


def unknown_parts(prompt: str, vocabulary: "Vocabulary") -> list[str]:
    """Return the words, or the bytes, of a prompt that the vocabulary lacks, each once."""
    if vocabulary.kind == "words":
        parts = [(word, word in vocabulary.ids) for word in prompt.split()]
    else:
        found = prompt.encode("utf-8", errors="surrogateescape")
        parts = [(f"byte 0x{value:02x}", value in vocabulary.values) for value in found]
    return list(dict.fromkeys(part for part, known in parts if not known))
