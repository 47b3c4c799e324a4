"""`prepare`: check a source, tokenise it, and write a complete corpus folder or none at all."""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from acmoe.config.text.data import PrepareConfig
from acmoe.data.folders import build_folder
from acmoe.data.progress import Progress, silent
from acmoe.data.sources import SourceRecord, describe_source
from acmoe.data.text.arrays import describe_array, smallest_dtype
from acmoe.data.text.byte_level import file_bytes, find_byte_file, proportional, write_bytes
from acmoe.data.text.corpus import MANIFEST, SPLITS, VOCABULARY, Manifest, is_intact, read_manifest
from acmoe.data.text.records import write_record
from acmoe.data.text.registry import Dataset, dataset
from acmoe.data.text.sentences import (
    find_sentence_files,
    read_sentence_manifest,
    task_of,
    write_sentences,
)
from acmoe.data.text.stdlib import read_stdlib, stdlib_record, stdlib_texts
from acmoe.data.text.vocabulary import Vocabulary, save_vocabulary
from acmoe.data.text.word_level import find_word_files, write_words
from acmoe.errors import UserError, check
from acmoe.storage.atomic import sha256_of

Source = Path | str | Mapping[str, Path]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of `prepare`; `created` is False where the folder was complete already.

    `counts` holds the tokens of each split. For a sentence set it holds rows, and
    `vocabulary_size` is 0.
    """

    name: str
    title: str
    folder: Path
    created: bool
    counts: dict[str, int]
    vocabulary_size: int


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The checksummed source files of a corpus, and the function that tokenises them."""

    title: str
    sources: list[SourceRecord]
    write: Callable[[Path], tuple[Vocabulary, dict[str, int]]]
    details: dict[str, int | str] = field(default_factory=dict)


def prepare(
    name: str,
    source: Source | None,
    out: Path,
    *,
    config: PrepareConfig | None = None,
    progress: Progress = silent,
) -> Prepared:
    """Write a corpus to the folder `out`; a second call with the same source changes nothing.

    Args:
        name: a data set of the registry; `words` and `bytes` take any text.
        source: the folder or file that the registry's `layout` describes, or for words a mapping
            from split to file; None for `stdlib`.
        out: the folder to create. It appears only once it is complete.

    Raises:
        UserError: the source is missing, broken or not the published one, or `out` has other
            files.
    """
    entry, config = dataset(name), config or PrepareConfig()
    _check_options(entry, config)
    _check_out(Path(out), name)
    if entry.kind == "sentences":
        return _prepare_sentences(entry, source, Path(out))
    return _prepare_corpus(entry, source, Path(out), config, progress)


def _check_options(entry: Dataset, config: PrepareConfig) -> None:
    capped = config.min_count > 1 or config.max_vocabulary is not None
    check(
        entry.kind == "words" or not capped,
        f"min_count and max_vocabulary are for word corpora; {entry.name} has none",
    )
    check(
        entry.kind == "bytes" or config.limit is None,
        f"limit={config.limit} is for byte-level corpora; {entry.name} is read whole",
    )
    check(
        entry.kind != "sentences" or not config.title, f"{entry.name} has its own name; omit title"
    )


def _check_out(out: Path, name: str) -> None:
    """Check that `out` holds only files of `prepare`, since the folder may be replaced."""
    if not out.exists():
        return
    check(out.is_dir(), f"{out} is a file; expected a folder to write {name!r} into")
    corpus = {f"{split}.npy" for split in SPLITS} | {MANIFEST, VOCABULARY, "contaminated"}
    rows = {f"{split}.{kind}" for split in ("train", "dev", "test") for kind in ("tsv", "csv")}
    strangers = sorted(path.name for path in out.iterdir() if path.name not in corpus | rows)
    check(
        not strangers,
        f"{out} holds {', '.join(strangers[:3])}, which is no prepared data; choose another folder",
    )
    other = _name_of(out)
    check(
        other in (None, name),
        f"{out} holds the prepared data set {other!r}; choose another folder or delete it",
    )


def _name_of(folder: Path) -> str | None:
    for read in (read_manifest, read_sentence_manifest):
        try:
            return read(folder).name
        except UserError:
            continue
    return None


def _prepare_sentences(entry: Dataset, source: Source | None, out: Path) -> Prepared:
    task = task_of(entry.name)
    files = find_sentence_files(task, _one_path(entry, source))
    sources = [describe_source(split, path) for split, path in files.items()]

    def done() -> bool:
        try:
            return read_sentence_manifest(out).sources == sources
        except UserError:
            return False

    created = build_folder(out, lambda folder: write_sentences(task, files, sources, folder), done)
    splits = read_sentence_manifest(out).splits
    return Prepared(
        name=entry.name,
        title=entry.title,
        folder=out,
        created=created,
        counts={split: record.rows for split, record in splits.items()},
        vocabulary_size=0,
    )


def _prepare_corpus(
    entry: Dataset, source: Source | None, out: Path, config: PrepareConfig, progress: Progress
) -> Prepared:
    plan = _plan(entry, source, config, progress)

    def done() -> bool:
        try:
            manifest = read_manifest(out)
        except UserError:
            return False
        same = (manifest.sources, manifest.options) == (plan.sources, _options(config))
        allowed = manifest.published or config.allow_other_counts or not entry.counts
        return same and allowed and is_intact(out, manifest)

    created = build_folder(out, lambda folder: _write_corpus(entry, plan, config, folder), done)
    manifest = read_manifest(out)
    return Prepared(
        name=entry.name,
        title=manifest.title,
        folder=out,
        created=created,
        counts={split: record.tokens for split, record in manifest.splits.items()},
        vocabulary_size=manifest.vocabulary_size,
    )


def _one_path(entry: Dataset, source: Source | None) -> Path:
    """Return the source as a path; a data set that needs one path takes no mapping and no None."""
    if not isinstance(source, Path | str):
        wanted = entry.layout or "no source, or one folder of modules"
        raise UserError(f"{entry.name} needs {wanted}; got {source}")
    return Path(source)


def _options(config: PrepareConfig) -> dict[str, int | str | None]:
    return {
        "min_count": config.min_count,
        "max_vocabulary": config.max_vocabulary,
        "limit": config.limit,
        "title": config.title,
    }


def _plan(
    entry: Dataset, source: Source | None, config: PrepareConfig, progress: Progress
) -> _Plan:
    if entry.name == "stdlib":
        return _stdlib_plan(entry, source, config, progress)
    if entry.kind == "words":
        given = source if isinstance(source, Mapping) else _one_path(entry, source)
        files = find_word_files(given)
        name = given.name if isinstance(given, Path) else files["train"][0].name
        return _Plan(
            title=f"{name} (words)",
            sources=[describe_source(split, path) for split in files for path in files[split]],
            write=lambda folder: write_words(files, folder, config, progress),
        )
    file = find_byte_file(_one_path(entry, source))
    return _Plan(
        title=f"{file.name} (bytes)",
        sources=[describe_source("all", file)],
        write=lambda folder: write_bytes(
            file_bytes(file, config.limit, progress),
            folder,
            lengths=proportional,
            all_values=entry.all_values,
        ),
    )


def _stdlib_plan(
    entry: Dataset, source: Source | None, config: PrepareConfig, progress: Progress
) -> _Plan:
    root = None if source is None else _one_path(entry, source)
    files = read_stdlib(root, progress)
    texts = stdlib_texts(files, config.limit)
    python = platform.python_version() if root is None else "not the running one"
    return _Plan(
        title=f"{root.name} (bytes)" if root else f"Python {python} standard library",
        sources=[stdlib_record(files)],
        details={"python": python, "files": len(files)},
        write=lambda folder: write_bytes(
            texts.values(),
            folder,
            lengths=lambda _: {split: len(text) for split, text in texts.items()},
            all_values=entry.all_values,
        ),
    )


def _write_corpus(entry: Dataset, plan: _Plan, config: PrepareConfig, folder: Path) -> None:
    vocabulary, counts = plan.write(folder)
    published = counts == entry.counts and vocabulary.size == entry.vocabulary_size
    if entry.counts and not published and not config.allow_other_counts:
        raise UserError(_difference(entry, counts, vocabulary.size))
    save_vocabulary(vocabulary, folder / VOCABULARY)
    dtype = smallest_dtype(vocabulary.size)
    manifest = Manifest(
        name=entry.name,
        title=config.title or (entry.title if published else plan.title),
        kind=vocabulary.kind,
        published=published,
        vocabulary_size=vocabulary.size,
        vocabulary_sha256=sha256_of(folder / VOCABULARY),
        splits={
            split: describe_array(folder / f"{split}.npy", count, dtype)
            for split, count in counts.items()
        },
        sources=plan.sources,
        options=_options(config),
        details=plan.details,
    )
    write_record(folder / MANIFEST, manifest)


def _difference(entry: Dataset, counts: dict[str, int], vocabulary_size: int) -> str:
    """Error message for the first count that differs from the published one."""
    fix = (
        f"fetch the real {entry.title}, prepare it as {entry.kind!r},"
        " or accept it with allow_other_counts (--allow-other-counts)"
    )
    for split, expected in entry.counts.items():
        if counts[split] != expected:
            return (
                f"{entry.name}: {split} has {counts[split]:,} tokens, expected {expected:,}; {fix}"
            )
    return f"{entry.name}: {vocabulary_size:,} symbols, expected {entry.vocabulary_size:,}; {fix}"
