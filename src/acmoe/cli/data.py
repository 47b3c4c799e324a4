"""`acmoe data list|prepare`: list the data sets, and prepare one."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from acmoe.data.text.registry import Dataset


@dataclass(frozen=True, kw_only=True)
class List:
    """List every data set: its content, whether it is prepared here, and where it comes from."""

    root: Path = Path("data")
    """Folder that holds the prepared data sets."""
    json: bool = False
    """Print the list as JSON."""

    def run(self) -> int:
        from acmoe.data.text.registry import datasets, found

        _check_root(self.root)
        entries = [(entry, found(entry.name, self.root)) for entry in datasets()]
        if self.json:
            rows = [
                {**asdict(entry), "state": here.state, "folder": str(here.folder)}
                for entry, here in entries
            ]
            print(json_text(rows))
            return 0
        console = Console()
        table = Table("name", "what", Column("here", overflow="fold"))
        for entry, here in entries:
            about = f"{entry.about} (licence: {entry.licence})"
            state = here.state if here.state == "absent" else f"{here.state}: {here.detail}"
            table.add_row(*map(escape, (entry.name, about, state)))
        console.print(table)
        # A column would break addresses and commands over two lines, which then cannot be copied.
        for entry, _ in entries:
            console.print(_origin(entry, self.root), markup=False, soft_wrap=True)
        return 0


def _check_root(root: Path) -> None:
    from acmoe.errors import check

    check(not root.exists() or root.is_dir(), f"--root {root} is no folder; name a folder")


def _origin(entry: "Dataset", root: Path) -> str:
    """Say in a few lines where a data set comes from, and which commands prepare it in `root`."""
    command = f"  acmoe data prepare {entry.name}"
    there = "" if root == List.root else f" --root {shlex.quote(str(root))}"
    lines = [f"{entry.name}: {entry.origin}"]
    if not entry.layout:
        lines.append(f"{command}{there}")
    else:
        lines.append(f"{command} --from PATH{there}  ({entry.layout})")
    if entry.hub:
        lines.append(f"{command} --from hf{there}  (downloads {entry.hub})")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Verify a source and tokenise it once into memory-mapped arrays. It is safe to interrupt.

    Data of the same name in the same folder is replaced if the source or the options differ.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Name of a data set in `acmoe data list`. `words` and `bytes` take any text."""
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Folder or file to read; `hf` downloads from the HuggingFace hub. `stdlib` needs none."""
    root: Path = Path("data")
    """Folder that holds the prepared data sets."""
    min_count: int = 1
    """Word level: a word that occurs fewer times than this in the training text becomes <unk>. 1
    keeps all words, also those of the validation or test text alone."""
    max_vocabulary: int | None = None
    """Word level: size of the vocabulary, which holds <eos>, <unk> and the most frequent words;
    unlimited if not given."""
    limit: int | None = None
    """Byte level: use only this many bytes; all if not given."""
    allow_other_counts: bool = False
    """Accept a source whose token counts differ from the published ones."""
    title: str = ""
    """Name of the corpus in reports; if empty, the published name or that of the source."""

    def run(self) -> int:
        from acmoe.config.text.data import PrepareConfig
        from acmoe.data.progress import progress_bars
        from acmoe.data.text.hub import download
        from acmoe.data.text.prepare import prepare
        from acmoe.data.text.registry import dataset
        from acmoe.errors import check

        needed = dataset(self.name).layout
        check(
            self.source is not None or not needed,
            f"{self.name} needs {needed}; name it with --from",
        )
        _check_root(self.root)
        out = self.root / self.name
        before = out.is_dir() and any(out.iterdir())
        console = Console(stderr=True)
        config = PrepareConfig(
            min_count=self.min_count,
            max_vocabulary=self.max_vocabulary,
            limit=self.limit,
            allow_other_counts=self.allow_other_counts,
            title=self.title,
        )
        with progress_bars(console) as progress:
            source = None if self.source is None else Path(self.source)
            if self.source == "hf":
                source = download(self.name, self.root / f"{self.name}.source", progress=progress)
            done = prepare(self.name, source, out, config=config, progress=progress)
        counts = ", ".join(f"{split} {count:,}" for split, count in done.counts.items())
        words = f"; {done.vocabulary_size:,} symbols" if done.vocabulary_size else ""
        verb = "prepared" if done.created else "already prepared, nothing to do"
        instead = ", in place of what was there" if done.created and before else ""
        print(f"{done.title}: {verb} in {done.folder} ({counts}{words}){instead}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Data:
    """List data sets, or prepare one."""

    action: (
        Annotated[List, tyro.conf.subcommand("list")]
        | Annotated[Prepare, tyro.conf.subcommand("prepare")]
    )

    def run(self) -> int:
        return self.action.run()
