"""`acmoe generate RUN --prompt TEXT`."""

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text, token by token, with the KV cache and the routing cache."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    prompt: str
    """The text to continue."""
    tokens: int = 200
    """New tokens."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest only."""
    top_p: float | None = None
    """Draw from the likeliest that hold this much probability."""
    seed: int = 0
    """Of the drawing."""
    which: Literal["best", "last"] = "best"
    """Checkpoint."""
    device: str = "auto"
    """cuda where there is one."""
    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        import torch

        from acmoe.errors import check
        from acmoe.evaluate.run import open_run
        from acmoe.runtime import pick_device

        device = pick_device(self.device)
        run = open_run(self.folder)
        vocabulary = run.vocabulary()
        ids = list(vocabulary.encode(self.prompt))
        check(bool(ids), f"prompt={self.prompt!r} holds no token; give at least one")
        model = run.model(self.which, device=device).eval()
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
            print(json_format.dumps({"prompt": self.prompt, "text": text}))
        else:
            joined = self.prompt + ("" if run.corpus().kind == "bytes" else " ") + text
            print(joined)
        return 0
