"""Fuzz targets of data sources: texts, sentence files, corpora, image folders and arrays."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from acmoe.data.images.arrays import open_array_splits
from acmoe.data.images.folder import open_splits
from acmoe.data.text.corpus import load_corpus
from acmoe.data.text.prepare import prepare
from acmoe.data.text.sentences import load_sentences
from acmoe.storage.atomic import sha256_of
from acmoe.storage.sealed import SEAL, seal_of
from faults.fuzz.common import BYTES, CHANGES, Target, allowed, changed, damaged, leaves_files
from faults.fuzz.materials import corpus, empty, fresh

LINES = b"the cat saw 7 dogs\nin house 4\n\n" * 8
ROWS = b"sentence\tlabel\na good film\t1\na bad film\t0\n"
CSV = b'text,category\n"lost my card",lost_or_stolen_card\n'

TEXT = st.binary(max_size=200) | st.builds(damaged, st.just(LINES), BYTES)
NAMES = st.sampled_from(["text.txt", "text.gz", "text.xz", "text"])


def _bytes(value: tuple[str, bytes]) -> None:
    name, text = value
    folder = empty()
    source = folder / name
    source.write_bytes(text)
    allowed(lambda: prepare("bytes", source, folder / "out"))
    _all_or_nothing(folder, source, text)


def _words(value: tuple[bytes, bytes, bytes]) -> None:
    folder = empty()
    source = folder / "source"
    source.mkdir()
    for split, text in zip(("train", "valid", "test"), value, strict=True):
        (source / f"{split}.txt").write_bytes(text)
    allowed(lambda: prepare("words", source, folder / "out"))
    _all_or_nothing(folder, source / "train.txt", value[0])


def _all_or_nothing(folder: Path, source: Path, text: bytes) -> None:
    """The source is as it was; the corpus is absent, or can be read; nothing hidden is left."""
    assert source.read_bytes() == text and not list(folder.glob(".*"))
    if (folder / "out").exists():
        load_corpus(folder / "out")


def _sentences(value: tuple[bytes, bytes]) -> None:
    folder = empty()
    for split in ("train", "dev", "test"):
        (folder / f"{split}.tsv").write_bytes(value[0])
        (folder / f"{split}.csv").write_bytes(value[1])
    for task in ("sst2", "sst5", "banking77"):
        leaves_files(folder, lambda task=task: load_sentences(task, folder))  # type: ignore[misc]


def _manifest(changes: list[Any]) -> None:
    folder = fresh(corpus())
    path = folder / "manifest.json"
    _seal(path, changed(_unsealed(path), changes))
    leaves_files(folder, lambda: _tokens(folder))


def _arrays(value: tuple[str, list[Any]]) -> None:
    """Change a file of a corpus, and make its checksum fit, so that its content is reached."""
    name, changes = value
    folder = fresh(corpus())
    (folder / name).write_bytes(damaged((folder / name).read_bytes(), changes))
    path = folder / "manifest.json"
    manifest = _unsealed(path)
    size, digest = (folder / name).stat().st_size, sha256_of(folder / name)
    if name == "vocabulary.json":
        manifest["vocabulary_sha256"] = digest
    else:
        manifest["splits"][name.removesuffix(".npy")].update(bytes=size, sha256=digest)
    _seal(path, manifest)
    leaves_files(folder, lambda: _tokens(folder))


def _unsealed(path: Path) -> Any:
    document = json.loads(path.read_text())
    document.pop(SEAL)
    return document


def _seal(path: Path, document: Any) -> None:
    if isinstance(document, dict):
        document = {**document, SEAL: seal_of(document)}
    path.write_text(json.dumps(document))


def _tokens(folder: Path) -> None:
    found = load_corpus(folder)
    _ = [found[split][:4].tolist() for split in ("train", "valid", "test")]
    found.vocabulary.decode(found["valid"][:4].tolist())


@cache
def image() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(file, "PNG")
    return file.getvalue()


@cache
def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, images=np.zeros((2, 4, 4, 3), np.uint8), labels=np.array([0, 1]))
    return file.getvalue()


FILE_NAMES = st.sampled_from(["a.png", "b.jpg", ".hidden.png", "c.gif", "d.ppm", "e.txt", "f.tif"])


def _folder(value: list[tuple[str, str, str, bytes | list[Any]]]) -> None:
    """Images of two classes; each is damaged, or any bytes."""
    root = empty()
    for split, name, file, change in value:
        (root / split / name).mkdir(parents=True, exist_ok=True)
        new = change if isinstance(change, bytes) else damaged(image(), change)
        (root / split / name / file).write_bytes(new)
    leaves_files(root, lambda: _pixels(open_splits(root)))


def _npz(value: tuple[str, bytes | list[Any]]) -> None:
    name, change = value
    root = empty()
    new = change if isinstance(change, bytes) else damaged(archive(), change)
    (root / name).write_bytes(new)
    leaves_files(root, lambda: _pixels(open_array_splits(root)))


def _pixels(splits: Any) -> None:
    for images in splits.values():
        for index in range(len(images.labels)):
            allowed(lambda images=images, index=index: images.pixels(index))  # type: ignore[misc]


IMAGES = st.lists(
    st.tuples(
        st.sampled_from(["train", "val", "test", "other"]),
        st.sampled_from(["cat", "dog", "\udcff", ".x"]),
        FILE_NAMES,
        BYTES | st.binary(max_size=60),
    ),
    max_size=4,
)
CORPUS_FILES = st.sampled_from(["train.npy", "valid.npy", "test.npy", "vocabulary.json"])
ARCHIVES = st.sampled_from(["train.npz", "train.npz.gz", "train.npz.xz", "trainx.npz"])
SENTENCES = st.tuples(
    st.builds(damaged, st.just(ROWS), BYTES) | TEXT, st.builds(damaged, st.just(CSV), BYTES) | TEXT
)

TARGETS = (
    Target("byte texts", st.tuples(NAMES, TEXT), _bytes),
    Target("word texts", st.tuples(TEXT, TEXT, TEXT), _words),
    Target("sentence files", SENTENCES, _sentences),
    Target("manifests", CHANGES, _manifest),
    Target(
        "corpus files",
        st.tuples(CORPUS_FILES, BYTES),
        _arrays,
        kept=(  # numpy raised an EOFError and a TokenError
            ("train.npy", [("cut", 0, b"\x00")]),
            ("train.npy", [("insert", 25, b"(")]),
        ),
    ),
    Target("image folders", IMAGES, _folder),
    Target("image arrays", st.tuples(ARCHIVES, BYTES | st.binary(max_size=60)), _npz),
)
