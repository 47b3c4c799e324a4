"""The registry of text data sets: descriptions, origins and published counts."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from acmoe.data.text.corpus import MANIFEST, is_intact, read_manifest
from acmoe.data.text.sentences import read_sentence_manifest
from acmoe.errors import UserError, check, suggest

ROOT = Path("data")  # the folder of the prepared data sets, unless a command gets another


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One text data set.

    Attributes:
        layout: the local files that `prepare` reads; empty: none are needed.
        hub: id on the HuggingFace hub, for `download` with the `data` extra; empty: none.
        hub_config: the hub's name of the variant to use.
        counts: published tokens of each split, checked by `prepare`; empty for a user's own text.
        vocabulary_size: published number of symbols; 0 for a user's own text.
        all_values: byte level: the vocabulary has all 256 values, not only those that occur.
    """

    name: str
    kind: Literal["words", "bytes", "sentences"]
    title: str
    about: str
    licence: str
    origin: str
    layout: str
    hub: str = ""
    hub_config: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    vocabulary_size: int = 0
    all_values: bool = False


_DATASETS = (
    Dataset(
        name="stdlib",
        kind="bytes",
        title="Python standard library",
        about="source text of the running Python's standard library, bytes, split by file",
        licence="PSF-2.0",
        origin="already on this machine",
        layout="",
        all_values=True,
    ),
    Dataset(
        name="wikitext103",
        kind="words",
        title="WikiText-103",
        about="103 million words of verified Wikipedia articles, whole words with case",
        licence="CC BY-SA 3.0",
        origin="Merity et al. 2016, Pointer Sentinel Mixture Models",
        layout="a folder with wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens",
        hub="Salesforce/wikitext",
        hub_config="wikitext-103-v1",
        counts={"train": 103_227_021, "valid": 217_646, "test": 245_569},
        vocabulary_size=267_735,
    ),
    Dataset(
        name="enwik8",
        kind="bytes",
        title="EnWik-8",
        about="first 100,000,000 bytes of a 2006 dump of the English Wikipedia",
        licence="GFDL",
        origin="http://mattmahoney.net/dc/enwik8.zip, unzipped",
        layout="the file enwik8, or the folder it lies in",
        counts={"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000},
        vocabulary_size=205,
    ),
    Dataset(
        name="words",
        kind="words",
        title="words",
        about="any text of yours, word by word, one paragraph a line",
        licence="yours",
        origin="yours",
        layout="a folder with train.txt, valid.txt, test.txt, or parts train_00.txt, train_01.txt",
    ),
    Dataset(
        name="bytes",
        kind="bytes",
        title="bytes",
        about="any file of yours, byte by byte",
        licence="yours",
        origin="yours",
        layout="a file",
        all_values=True,
    ),
    Dataset(
        name="sst2",
        kind="sentences",
        title="SST-2",
        about="film reviews, negative or positive",
        licence="not stated by its authors; research use",
        origin="Socher et al. 2013, Stanford Sentiment Treebank, as in GLUE",
        layout="a folder with train.tsv, dev.tsv, test.tsv: sentence<TAB>label",
        hub="stanfordnlp/sst2",
    ),
    Dataset(
        name="sst5",
        kind="sentences",
        title="SST-5",
        about="film reviews in five grades",
        licence="not stated by its authors; research use",
        origin="Socher et al. 2013, Stanford Sentiment Treebank",
        layout="a folder with train.tsv, dev.tsv, test.tsv: sentence<TAB>label",
        hub="SetFit/sst5",
    ),
    Dataset(
        name="banking77",
        kind="sentences",
        title="Banking-77",
        about="questions to a bank in 77 intents",
        licence="CC BY 4.0",
        origin="Casanueva et al. 2020, Efficient Intent Detection with Dual Sentence Encoders",
        layout="a folder with train.csv, test.csv: text,category",
        hub="legacy-datasets/banking77",
    ),
)


def datasets() -> list[Dataset]:
    """List all known data sets; the one that needs no download comes first."""
    return list(_DATASETS)


def dataset(name: str) -> Dataset:
    """Return the data set of that name."""
    by_name = {entry.name: entry for entry in _DATASETS}
    check(name in by_name, f"data set {name!r} is not known; {suggest(name, by_name)}")
    return by_name[name]


def how_to_prepare(name: str, folder: Path) -> str:
    """Say which command prepares a data set in `folder`, for the message that it is missing."""
    entry = dataset(name)
    command = f"acmoe data prepare {name}"
    elsewhere = folder.name == name and folder.parent != ROOT
    root = f" --root {shlex.quote(str(folder.parent))}" if elsewhere else ""
    if not entry.layout:
        return f"run `{command}{root}`"
    download = f"`{command} --from hf{root}`, which downloads {entry.hub}, or " if entry.hub else ""
    origin = f" ({entry.origin})" if entry.origin.startswith("http") else ""
    return f"run {download}`{command} --from PATH{root}` with {entry.layout}{origin}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The state of a data set on disk: prepared, absent or damaged."""

    folder: Path
    state: Literal["prepared", "absent", "damaged"]
    detail: str


def found(name: str, root: Path) -> Found:
    """Look up the data set in `root`/`name`; checks the manifest and the sizes of files only."""
    entry, folder = dataset(name), root / name
    if not (folder / MANIFEST).is_file():
        return Found(folder=folder, state="absent", detail="not prepared")
    try:
        if entry.kind == "sentences":
            rows = read_sentence_manifest(folder)
            check(rows.name == name, _other(folder, rows.name, name))
            splits = rows.splits
            detail = ", ".join(f"{split} {record.rows:,}" for split, record in splits.items())
        else:
            manifest = read_manifest(folder)
            check(manifest.name == name, _other(folder, manifest.name, name))
            check(
                is_intact(folder, manifest, verify=False),
                f"{folder} is damaged: prepare {name!r} again",
            )
            tokens = (f"{split} {record.tokens:,}" for split, record in manifest.splits.items())
            detail = f"{manifest.title}: {', '.join(tokens)}"
    except UserError as error:
        return Found(folder=folder, state="damaged", detail=str(error))
    return Found(folder=folder, state="prepared", detail=detail)


def _other(folder: Path, held: str, wanted: str) -> str:
    return f"{folder} holds {held!r}, not {wanted!r}; move it away, and prepare {wanted!r} again"
