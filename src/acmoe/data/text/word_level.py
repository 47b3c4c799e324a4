"""Word-level corpora in WikiText's format: whitespace-separated words, `<eos>` after every line.

A first pass numbers words by their first appearance, in training, validation and test text in that
order. A second pass, over the numbers only, replaces rare words and writes the narrowest dtype.
"""

import logging
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from acmoe.config.text.data import PrepareConfig
from acmoe.data.progress import Progress
from acmoe.data.sources import SUFFIXES, find_file, read_lines
from acmoe.data.text.arrays import smallest_dtype, write_array
from acmoe.data.text.vocabulary import EOS, UNK, WordVocabulary
from acmoe.errors import UserError, check

BUFFER = 1 << 20  # token ids held before they go to disk


def find_word_files(source: Path | Mapping[str, Path]) -> dict[str, list[Path]]:
    """Find the text files of each split, from a mapping or by their names in a folder.

    Names are `wiki.SPLIT.tokens`, `SPLIT.txt` or numbered parts `SPLIT_*.txt`, plain, .xz or .gz.
    """
    if not isinstance(source, Path):
        missing = {"train", "valid", "test"} - set(source)
        check(
            not missing,
            f"no file was given for {', '.join(sorted(missing))}; give one for each split",
        )
        return {split: [Path(source[split])] for split in ("train", "valid", "test")}
    check(
        source.is_dir(), f"{source} is not a folder; expected one with train, valid and test text"
    )
    return {split: _split_files(source, split) for split in ("train", "valid", "test")}


def _split_files(folder: Path, split: str) -> list[Path]:
    names = (f"wiki.{split}.tokens", f"{split}.txt")
    whole = find_file(folder, names)
    kinds = [sorted(folder.glob(f"{split}_*.txt{suffix}")) for suffix in SUFFIXES]
    kinds = [parts for parts in kinds if parts]
    if whole is not None:
        numbered = [part for parts in kinds for part in parts if _is_numbered(part, split)]
        _check_one_form(whole, numbered[:1], split)
        return [whole]
    if kinds:
        _check_one_form(kinds[0][0], [parts[0] for parts in kinds[1:]], split)
        return kinds[0]
    raise UserError(
        f"{folder} has no {split} text; expected {' or '.join(names)} or {split}_*.txt,"
        " plain, .xz or .gz"
    )


def _is_numbered(path: Path, split: str) -> bool:
    return re.fullmatch(rf"{split}_\d+\.txt.*", path.name) is not None


def _check_one_form(found: Path, others: Sequence[Path], split: str) -> None:
    """Raise a UserError if a split's text is there in a second form, which would not be read."""
    names = " and ".join(path.name for path in (found, *others))
    check(
        not others,
        f"{found.parent} holds {names} for the {split} text, and one form of it is read: whole or "
        "in parts, all plain, .xz or .gz; remove the others, or make them alike",
    )


def write_words(
    files: Mapping[str, Sequence[Path]], folder: Path, config: PrepareConfig, progress: Progress
) -> tuple[WordVocabulary, dict[str, int]]:
    """Tokenise each split to `folder`/SPLIT.npy; return the vocabulary and the token counts."""
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # an unseen word gets the next number
    end = numbers[EOS]
    counts, trained = {}, 0
    for split, paths in files.items():
        counts[split] = _number_words(paths, folder / f"{split}.raw", numbers, end, progress)
        trained = trained or len(numbers)  # the training text comes first
    keep = _frequent_words(numbers, folder / "train.raw", config)
    _check_words(list(numbers)[:trained], keep, files["train"][0], config.min_count)
    symbols = [word for word, stays in zip(numbers, keep, strict=True) if stays]
    _say_untrained(symbols, {*list(numbers)[:trained], UNK})
    vocabulary = WordVocabulary(tuple(symbols if UNK in symbols else [*symbols, UNK]))
    renumber = np.full(len(keep), vocabulary.unk_id, dtype=np.int32)
    renumber[keep] = np.arange(len(symbols))
    for split, length in counts.items():
        check(length >= 2, f"{files[split][0]} holds {length} token; expected two or more")
        raw = folder / f"{split}.raw"
        ids = (renumber[chunk] for chunk in _chunks(raw))
        write_array(folder / f"{split}.npy", smallest_dtype(vocabulary.size), length, ids)
        raw.unlink()
    return vocabulary, counts


def _check_words(
    trained: Sequence[str], keep: NDArray[np.bool_], path: Path, min_count: int
) -> None:
    """Check that the training text has words, and that the vocabulary keeps one of them."""
    words = [number for number, word in enumerate(trained) if word not in (EOS, UNK)]
    check(bool(words), f"{path} holds no words; give a training text")
    check(
        bool(keep[words].any()),
        f"min_count={min_count}: no word of {path} occurs that often; choose a lower one",
    )


def _say_untrained(symbols: Sequence[str], trained: set[str]) -> None:
    """Warn of words of the vocabulary that a model predicts without having seen them."""
    new = [word for word in symbols if word not in trained]
    if new:
        logging.getLogger("acmoe").warning(
            f"{len(new):,} of {len(symbols):,} words are in the validation or test text alone, "
            f"such as {new[0]!r}; no model learns them, which raises its perplexity: "
            "--max-vocabulary or --min-count 2 makes them <unk>"
        )


def _number_words(
    paths: Sequence[Path], raw: Path, numbers: dict[str, int], end: int, progress: Progress
) -> int:
    """Write the word numbers of text files as raw int32; return their count."""
    total = 0
    with raw.open("wb") as out:
        for path in paths:
            buffer = array("i")

            def report(done: int, size: int, name: str = path.name) -> None:
                progress(name, done, size)

            for _, line in read_lines(path, report):
                buffer.extend([numbers[word] for word in line.split()])
                buffer.append(end)
                if len(buffer) >= BUFFER:
                    total += len(buffer)
                    buffer.tofile(out)
                    del buffer[:]
            total += len(buffer)
            buffer.tofile(out)
    return total


def _chunks(raw: Path) -> Iterator[NDArray[np.int32]]:
    with raw.open("rb") as file:
        while (chunk := np.fromfile(file, dtype=np.int32, count=BUFFER)).size:
            yield chunk


def _frequent_words(
    numbers: Mapping[str, int], train: Path, config: PrepareConfig
) -> NDArray[np.bool_]:
    """Return a mask of the words to keep: all, or those frequent enough in the training text.

    Only the training text is counted, so that every kept word has a trained embedding. Where all
    are kept, as in the published code, words of the other texts alone are kept too.
    """
    if config.min_count == 1 and config.max_vocabulary is None:
        return np.ones(len(numbers), dtype=np.bool_)
    counts = np.zeros(len(numbers), dtype=np.int64)
    for chunk in _chunks(train):
        counts += np.bincount(chunk, minlength=len(numbers))
    special = [numbers[EOS], *([numbers[UNK]] if UNK in numbers else [])]
    keep: NDArray[np.bool_] = counts >= config.min_count
    keep[special] = False
    if config.max_vocabulary is not None:
        # Most frequent first, ties by first appearance; <eos> and <unk> take two places.
        rank = np.lexsort((np.arange(len(counts)), -counts))
        rank = rank[keep[rank]]
        keep[rank[config.max_vocabulary - 2 :]] = False
    keep[special] = True
    return keep
