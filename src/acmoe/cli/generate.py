"""`acmoe generate RUN --prompt TEXT`: continue a text with a trained language model."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from acmoe.cli.run_options import run_threads
from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from acmoe.data.text.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text, token by token, with the KV cache and the routing cache."""

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
    which: Literal["best", "last"] = "best"
    """The checkpoint to load: the best by validation, or the last."""
    device: str = "auto"
    """Device to run on; auto takes a GPU if there is one."""
    threads: int | None = None
    """Number of CPU threads. If not given: OMP_NUM_THREADS, else 1 for small models and torch's
    default for others."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        import torch

        from acmoe.errors import check
        from acmoe.evaluate.run import open_run
        from acmoe.runtime import pick_device

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
        # A spinner, on a terminal only: the text comes in seconds.
        with Console(stderr=True).status(f"generating {self.tokens} tokens"):
            new = model.generate(
                torch.tensor([ids], device=device),
                self.tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=self.seed,
            )
        text = vocabulary.decode(new[0].tolist())
        if self.json:
            print(json_text({"prompt": self.prompt, "text": text}, indent=None))
        else:
            joined = self.prompt + ("" if vocabulary.kind == "bytes" else " ") + text
            print(joined)
        return 0


def unknown_parts(prompt: str, vocabulary: "Vocabulary") -> list[str]:
    """Return the words, or the bytes, of a prompt that the vocabulary lacks, each once."""
    if vocabulary.kind == "words":
        parts = [(word, word in vocabulary.ids) for word in prompt.split()]
    else:
        found = prompt.encode("utf-8", errors="surrogateescape")
        parts = [(f"byte 0x{value:02x}", value in vocabulary.values) for value in found]
    return list(dict.fromkeys(part for part, known in parts if not known))
