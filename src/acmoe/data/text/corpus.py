"""A prepared corpus: three memory-mapped streams of token ids, a vocabulary and a manifest."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from acmoe.data.sources import SourceRecord
from acmoe.data.text.arrays import ArrayRecord, Tokens, check_array, open_array
from acmoe.data.text.records import check_record, check_sha256, read_record
from acmoe.data.text.vocabulary import Vocabulary, load_vocabulary
from acmoe.errors import UserError, check

SPLITS = ("train", "valid", "test")
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.json"
FORMAT, VERSION = "acmoe-corpus", 1

Kind = Literal["words", "bytes"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a corpus folder and its sources; it is the last file to be written.

    Nothing in it depends on the date or the machine, so equal sources give equal manifests.
    `published` is True if the counts are the published ones of the data set of that name.
    """

    name: str
    title: str
    kind: Kind
    published: bool
    vocabulary_size: int
    vocabulary_sha256: str
    splits: dict[str, ArrayRecord]
    sources: list[SourceRecord]
    options: dict[str, int | str | None] = field(default_factory=dict)
    details: dict[str, int | str] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token ids by split (`corpus["valid"]`), and the vocabulary to decode them."""

    folder: Path
    manifest: Manifest
    vocabulary: Vocabulary
    streams: dict[str, Tokens]

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def title(self) -> str:
        return self.manifest.title

    @property
    def kind(self) -> Kind:
        return self.manifest.kind

    def __getitem__(self, split: str) -> Tokens:
        check(
            split in self.streams,
            f"split {split!r} is not in {self.folder}; choose one of {', '.join(self.streams)}",
        )
        return self.streams[split]


def _fix(folder: Path, name: str) -> str:
    return f"delete {folder} and prepare {name!r} again"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a corpus folder and check its format and version."""
    path = folder / MANIFEST
    check(path.is_file(), f"no prepared corpus in {folder}; run `acmoe data prepare NAME` first")
    fix = _fix(folder, folder.name)
    manifest = read_record(path, Manifest, fix=fix)
    check_record(path, (manifest.format, manifest.version), (FORMAT, VERSION), fix)
    check(
        set(manifest.splits) == set(SPLITS),
        f"{path} lists {', '.join(manifest.splits)}; expected {', '.join(SPLITS)}; {fix}",
    )
    return manifest


def is_intact(folder: Path, manifest: Manifest, *, verify: bool = True) -> bool:
    """Return True where every file of the manifest has its recorded size and checksum.

    Without `verify` only sizes are compared.
    """
    try:
        for record in manifest.splits.values():
            check_array(folder, record, fix="", verify=verify)
        check((folder / VOCABULARY).is_file(), "")
        if verify:
            check_sha256(folder / VOCABULARY, manifest.vocabulary_sha256, fix="")
    except UserError:
        return False
    return True


def load_corpus(folder: Path | str, *, verify: bool = True) -> Corpus:
    """Open a prepared corpus memory-mapped, after comparing the SHA-256 of every file.

    Without `verify` the checksums are left out (a gigabyte takes about a second) and a changed byte
    goes unnoticed.

    Raises:
        UserError: the folder has no prepared corpus, or a file differs from the manifest.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    fix = _fix(folder, manifest.name)
    path = folder / VOCABULARY
    vocabulary = load_vocabulary(path)
    check(
        vocabulary.size == manifest.vocabulary_size and vocabulary.kind == manifest.kind,
        f"{path} holds {vocabulary.size} {vocabulary.kind}, expected {manifest.vocabulary_size}"
        f" {manifest.kind}; {fix}",
    )
    if verify:
        check_sha256(path, manifest.vocabulary_sha256, fix)
    streams = {
        split: open_array(folder, manifest.splits[split], fix=fix, verify=verify)
        for split in SPLITS
    }
    return Corpus(folder=folder, manifest=manifest, vocabulary=vocabulary, streams=streams)
