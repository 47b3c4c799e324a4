"""The standard library is a corpus that every Python brings along."""

import hashlib
import platform
from pathlib import Path

import numpy as np
import pytest

from acmoe.config.text.data import PrepareConfig
from acmoe.data.progress import silent
from acmoe.data.text.corpus import load_corpus
from acmoe.data.text.prepare import prepare
from acmoe.data.text.stdlib import read_stdlib, stdlib_texts
from acmoe.errors import UserError

SIZE = 2000


def module(name: str) -> bytes:
    return f"# {name}\n".encode().ljust(SIZE, b"x")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """100 modules of 2,000 bytes, and files that are none of the library's."""
    root = tmp_path / "lib"
    (root / "json").mkdir(parents=True)
    names = [f"m{i}.py" for i in range(60)] + [f"json/m{i}.py" for i in range(40)]
    for name in names:
        (root / name).write_bytes(module(name))
    others = (
        "test/m.py",
        "json/tests/m.py",
        "site-packages/torch/m.py",
        "idlelib/m.py",
        "config-3.11-linux/python-config.py",
        "_sysconfigdata__linux.py",
        "json/data.txt",
    )
    for name in others:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"not wanted")
    return root


def test_the_order_is_that_of_a_hash_of_the_names_and_tests_are_left_out(library: Path) -> None:
    names = [file.name for file in read_stdlib(library, silent)]
    assert len(names) == 100
    assert names == sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert not any("test" in name or "site-packages" in name for name in names)


def test_files_are_split_whole_into_ninety_five_and_five_percent(library: Path) -> None:
    files = read_stdlib(library, silent)
    texts = stdlib_texts(files, None)
    # 100 equal files: 90, 5 and 5 of them, in the shuffled order.
    assert {split: len(text) // SIZE for split, text in texts.items()} == {
        "train": 90,
        "valid": 5,
        "test": 5,
    }
    assert b"".join(texts.values()) == b"".join(file.data for file in files)


def test_a_corpus_of_another_library_is_not_called_that_of_this_python(
    library: Path, tmp_path: Path
) -> None:
    first = prepare("stdlib", library, tmp_path / "out")
    assert first.counts == {"train": 180_000, "valid": 10_000, "test": 10_000}
    corpus = load_corpus(tmp_path / "out", verify=True)
    assert corpus.vocabulary.size == 256
    assert corpus.manifest.details == {"python": "not the running one", "files": 100}
    assert corpus.title == "lib (bytes)"
    assert not prepare("stdlib", library, tmp_path / "out").created
    (library / "new.py").write_bytes(module("new.py"))
    assert prepare("stdlib", library, tmp_path / "out").created


def test_a_limit_is_shared_ninety_five_and_five(library: Path, tmp_path: Path) -> None:
    config = PrepareConfig(limit=10_000)
    limited = prepare("stdlib", library, tmp_path / "out", config=config)
    assert limited.counts == {"train": 9000, "valid": 500, "test": 500}


def test_a_stripped_or_zipped_library_is_explained(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_bytes(b"x" * 10)
    with pytest.raises(UserError, match=r"only 10 bytes of library source in .*stripped"):
        read_stdlib(tmp_path, silent)
    with pytest.raises(UserError, match=r"no source of the standard library in .*python\.zip"):
        read_stdlib(tmp_path / "python.zip", silent)


def test_a_library_of_one_file_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_bytes(b"x" * 200_000)
    with pytest.raises(UserError, match="fell into the valid split"):
        prepare("stdlib", tmp_path, tmp_path / "out")


def test_the_running_python_has_a_corpus_that_records_its_version(tmp_path: Path) -> None:
    config = PrepareConfig(limit=200_000)
    prepare("stdlib", None, tmp_path / "out", config=config)
    corpus = load_corpus(tmp_path / "out")
    text = corpus.vocabulary.decode(np.asarray(corpus["train"]))
    assert len(corpus["train"]) == 180_000
    assert corpus.manifest.details["python"] == platform.python_version()
    assert corpus.title == f"Python {platform.python_version()} standard library"
    assert "import " in text and "def " in text
