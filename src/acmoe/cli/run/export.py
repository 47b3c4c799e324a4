"""`acmoe export RUN --to hf DIR`: write a run for HuggingFace transformers, and back."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from acmoe.cli.arguments.shared import Json
from acmoe.storage.strict_json import json_text


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run as a HuggingFace model (--to hf), or such a model as a run (--to run)."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """Folder of a run, also of a finetuned one; with --to run, a folder that --to hf wrote."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The folder to write; it must be new or empty."""
    to: Literal["hf", "run"]
    """The format to write."""
    which: Literal["best", "last"] = "best"
    """--to hf: the checkpoint to export, the best by validation or the last."""
    ema: bool = False
    """--to hf, images: export the moving average of the weights."""
    shard_size: str | None = None
    """--to hf: largest file of weights, such as 500MB; 5GB if not given."""
    json: Json = False

    def run(self) -> int:
        from acmoe.errors import check

        check(
            find_spec("transformers") is not None,
            "export needs the hf extra: pip install 'acmoe[hf]'",
        )
        if self.to == "hf":
            step = self._to_hf()
        else:
            check(
                self.which == "best" and not self.ema,
                "--which and --ema choose a checkpoint for --to hf; an exported folder has one",
            )
            check(
                self.shard_size is None,
                f"--shard-size {self.shard_size} is for --to hf; a run has one file of weights",
            )
            from acmoe.hf.models.restore import restore_run

            step = restore_run(self.source, self.folder)
        found = {"source": str(self.source), "folder": str(self.folder), "to": self.to}
        if self.json:
            print(json_text({**found, "step": step}, indent=None))
        else:
            print(f"step {step} of {self.source} is in {self.folder}")
        return 0

    def _to_hf(self) -> int:
        from acmoe.hf.models.export import export_run

        return export_run(
            self.source,
            self.folder,
            which=self.which,
            ema=self.ema,
            max_shard_size=self.shard_size or "5GB",
        ).step
