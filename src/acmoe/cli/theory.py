"""`acmoe theory`: check the paper's mathematical statements numerically."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Theory:
    """Check the paper's theorem, lemmas and propositions numerically, and say where they fail."""

    seed: int = 0
    """Seed of the random draws."""
    json: bool = False
    """Print the checks with all their numbers as JSON."""
    figures: Path | None = None
    """Also draw figures into this folder (needs the plots extra)."""

    def run(self) -> int:
        from acmoe.data.progress import progress_bars
        from acmoe.lab.theory import all_confirmed, render, run_checks, to_json

        if self.figures is not None:
            self._check_figures(self.figures)
        with progress_bars(Console(stderr=True)) as progress:
            checks = run_checks(seed=self.seed, progress=progress)
        try:
            if self.json:
                print(to_json(checks))
            else:
                Console().print(render(checks))
        finally:  # also where the reader of a pipe, such as head, has left
            self._draw()
        return 0 if all_confirmed(checks) else 1

    def _draw(self) -> None:
        if self.figures is not None:
            from acmoe.lab.theory.plots import save_theory_figures

            for path in save_theory_figures(self.figures, seed=self.seed):
                print(f"wrote {path}", file=sys.stderr)

    def _check_figures(self, folder: Path) -> None:
        """Raise a UserError, before any check is computed, if no figure can be drawn or written."""
        from acmoe.errors import check
        from acmoe.storage.writable import check_can_fill

        check(
            find_spec("matplotlib") is not None,
            f"--figures {folder} needs the plots extra: pip install 'acmoe[plots]'",
        )
        check_can_fill(folder)
