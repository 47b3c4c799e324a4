"""The data sets of the studies: read from one folder, and prepared once.

The folder contains, plain or compressed (.xz, .gz):

    enwiki15-bytes/   one file of bytes          enwik8-prefix/   one file of bytes
    enwiki15-words/   train_*.txt, valid, test   wikitext103/     wiki.valid.tokens
    sst2/ sst5/ banking77/                       as `acmoe data prepare` takes them
    imagenette/       train*.npz, val*.npz of image files, all of one size

A study needs only the data sets that it reads; docs/howto/study-data.md says how to get each.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from acmoe.config.images.data import ImageDataConfig
from acmoe.config.text.data import PrepareConfig
from acmoe.data.folders import build_folder
from acmoe.data.images.arrays import open_array_splits
from acmoe.data.images.load import load_images
from acmoe.data.progress import Progress, silent
from acmoe.data.sources import find_file, read_chunks
from acmoe.data.text.corpus import load_corpus
from acmoe.data.text.prepare import prepare
from acmoe.data.text.vocabulary import ByteVocabulary, Ids
from acmoe.errors import UserError, check

MEGABYTE = 1_000_000
# The files of every data set, for the message that its folder is missing.
FILES = {
    "enwiki15-bytes": "one file of text",
    "enwik8-prefix": "one file of text, such as the first bytes of EnWik-8",
    "enwiki15-words": "train_00.txt, train_01.txt, ..., valid.txt and test.txt",
    "wikitext103": "wiki.valid.tokens",
    "sst2": "train.tsv and dev.tsv",
    "sst5": "train.tsv, dev.tsv and test.tsv",
    "banking77": "train.csv and test.csv",
    "imagenette": "train.npz and val.npz",
}


class Text(NamedTuple):
    """A prepared corpus."""

    name: str  # in the registry of data sets
    folder: Path
    vocab_size: int
    fingerprint: str  # start of the training text's checksum
    limit: int | None = None  # bytes, for the standard library's text


class Images(NamedTuple):
    """Prepared images."""

    folder: Path
    size: int  # pixels per side
    classes: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Materials:
    """Prepares data sets: reads them from `data`, which stays unchanged, and writes into `work`."""

    data: Path
    work: Path
    progress: Progress = silent

    def bytes(self, megabytes: float) -> Text:
        """Prepare the first megabytes of the English Wikipedia of 2015, split 90 : 5 : 5."""
        limit = int(megabytes * MEGABYTE)
        config = PrepareConfig(limit=limit, title=f"enwiki15 bytes, {megabytes:g} MB")
        return self._corpus("bytes", "enwiki15-bytes", f"bytes-{megabytes:g}", config)

    def stdlib(self, megabytes: float) -> Text:
        """Prepare source text of Python's standard library, split 90 : 5 : 5, without `data`."""
        limit = int(megabytes * MEGABYTE)
        config = PrepareConfig(limit=limit)
        return self._corpus("stdlib", None, f"stdlib-{megabytes:g}", config)._replace(limit=limit)

    def digits(self) -> str:
        """Return the fingerprint of scikit-learn's digits, which need no preparation."""
        train = load_images(ImageDataConfig(name="digits")).train
        pixels = np.stack([train.pixels(index) for index in range(len(train))])
        return hashlib.sha256(pixels.tobytes()).hexdigest()[:12]

    def words(self, parts: int, vocabulary: int) -> Text:
        """Prepare words of Wikipedia: `parts` files of text, and the most frequent words."""
        source, files = self._folder("enwiki15-words"), self._word_files(parts)
        chosen = self.work / f"words-{parts}-source"
        chosen.mkdir(parents=True, exist_ok=True)
        for file in (*files, *source.glob("valid.txt*"), *source.glob("test.txt*")):
            _link(chosen / file.name, file.resolve())
        config = PrepareConfig(max_vocabulary=vocabulary, title="enwiki15 words")
        return self._corpus("words", chosen, f"words-{parts}-{vocabulary}", config)

    def images(self) -> Images:
        """Decode Imagenette, once, into arrays of pixels."""
        source, out = self._folder("imagenette"), self.work / "imagenette"
        build_folder(out, lambda new: _decode(source, new, self.progress), out.is_dir)
        with np.load(out / "train.npz", allow_pickle=False) as train:
            labels, pixels = train["labels"], train["images"]
        fingerprint = hashlib.sha256(pixels).hexdigest()[:12]
        return Images(out, int(pixels.shape[1]), int(labels.max()) + 1, fingerprint)

    def other_bytes(self, text: Text, tokens: int) -> Path:
        """Encode the first bytes of EnWik-8 in the token ids of a byte corpus; return the file."""
        file = _only_file(self._folder("enwik8-prefix"))
        vocabulary = load_corpus(text.folder).vocabulary
        assert isinstance(vocabulary, ByteVocabulary)
        content = b"".join(read_chunks(file))[:tokens]
        return self._stream(f"enwik8-{tokens}", lambda: vocabulary.encode_bytes(content))

    def other_words(self, text: Text) -> Path:
        """Encode the validation text of WikiText-103 by a corpus' vocabulary; return the file."""
        folder = self._folder("wikitext103")
        file = find_file(folder, ("wiki.valid.tokens",))
        if file is None:
            raise UserError(f"{folder} has no wiki.valid.tokens, plain, .xz or .gz; put it there")
        vocabulary = load_corpus(text.folder).vocabulary
        content = b"".join(read_chunks(file)).decode("utf-8")
        name = f"wikitext103-{text.folder.name}"
        return self._stream(name, lambda: vocabulary.encode(content))

    def tasks(self, names: tuple[str, ...]) -> Path:
        """Prepare the sentences of each task; return the folder that contains them."""
        for name in names:
            prepare(name, self._folder(name), self.work / name)
        return self.work

    def _corpus(
        self, name: str, source: str | Path | None, out: str, config: PrepareConfig
    ) -> Text:
        path = self._folder(source) if isinstance(source, str) else source
        made = prepare(name, path, self.work / out, config=config, progress=self.progress)
        manifest = load_corpus(made.folder).manifest
        return Text(name, made.folder, made.vocabulary_size, manifest.splits["train"].sha256[:12])

    def _word_files(self, parts: int) -> list[Path]:
        """Return the first `parts` files of the words' training text."""
        source = self._folder("enwiki15-words")
        files = sorted(source.glob("train_*.txt*"))
        check(
            len(files) >= parts,
            f"--parts {parts}, but {source} has {len(files)} files train_*.txt; lower it",
        )
        return files[:parts]

    def _folder(self, name: str) -> Path:
        folder = self.data / name
        check(
            folder.is_dir(),
            f"{folder} is missing; --data needs this folder, with {FILES[name]} "
            "(docs/howto/study-data.md says how to get them)",
        )
        return folder

    def _stream(self, name: str, encode: Callable[[], Ids]) -> Path:
        out = self.work / name
        build_folder(out, lambda new: np.save(new / "tokens.npy", encode()), out.is_dir)
        return out / "tokens.npy"


def _link(path: Path, target: Path) -> None:
    """Point a symbolic link to the file; other processes may do the same at the same time."""
    if path.is_symlink() and path.readlink() == target:
        return
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    os.replace(new, path)  # also replaces a link into a data folder that was moved


def _only_file(folder: Path) -> Path:
    files = [path for path in folder.iterdir() if path.is_file()]
    check(len(files) == 1, f"{folder} holds {len(files)} files; expected one")
    return files[0]


def _decode(source: Path, out: Path, progress: Progress) -> None:
    """Decode image files into arrays of pixels, so that no worker has to decode them."""
    for split, images in open_array_splits(source).items():
        pixels = []
        for index in range(len(images)):
            pixels.append(images.pixels(index))
            progress(f"decoding {split}", index + 1, len(images))
        shapes = {image.shape for image in pixels}
        check(
            len(shapes) == 1 and next(iter(shapes))[0] == next(iter(shapes))[1],
            f"{source} has images of {len(shapes)} shapes; the study needs squares of one size",
        )
        name = "val" if split == "valid" else split
        np.savez(out / f"{name}.npz", images=np.stack(pixels), labels=images.labels)
