"""Corrupted validation and test text, made once and stored in the corpus folder.

The same seed and rate give the same text, so that all models are scored on it. Training text stays
clean.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from acmoe.config.text.data import ContaminationConfig
from acmoe.data.folders import build_folder
from acmoe.data.seeding import derive_seed
from acmoe.data.text.arrays import (
    ArrayRecord,
    Tokens,
    check_array,
    describe_array,
    open_array,
    write_array,
)
from acmoe.data.text.corpus import MANIFEST, Corpus
from acmoe.data.text.records import check_record, read_record, write_record
from acmoe.data.text.swaps import SwapReport, swap_bytes, swap_words
from acmoe.data.text.vocabulary import WordVocabulary
from acmoe.errors import UserError, check

CORRUPTED_SPLITS = ("valid", "test")
FORMAT, VERSION = "acmoe-contaminated", 1
WORD_RATE, BYTE_RATE = 0.025, 0.05  # default rates


@dataclass(frozen=True, kw_only=True)
class ContaminationManifest:
    """The corrupted arrays of one rate and seed, and the clean arrays they were made from."""

    rate: float
    seed: int
    early_stop: bool
    clean_sha256: dict[str, str]
    splits: dict[str, ArrayRecord]
    reports: dict[str, SwapReport]
    format: str = FORMAT
    version: int = VERSION


class Contaminated(NamedTuple):
    """Streams for `EvaluationBatches(inputs, targets=targets, ...)`, and the counts of changes."""

    inputs: Tokens
    targets: Tokens
    report: SwapReport


def contaminate(
    corpus: Corpus, split: str, config: ContaminationConfig | None = None
) -> Contaminated:
    """Return the corrupted stream of a split, which is made on the first call and then reused."""
    config = config or ContaminationConfig()
    check(
        split in CORRUPTED_SPLITS,
        f"split {split!r} is not corrupted; choose one of {', '.join(CORRUPTED_SPLITS)}",
    )
    check(
        config.early_stop or corpus.kind == "words",
        "early_stop=False is for word corpora; bytes are replaced one by one",
    )
    folder = corpus.folder / "contaminated" / _label(corpus, config)
    build_folder(folder, lambda new: _write(corpus, config, new), lambda: _done(corpus, folder))
    fix = f"delete {folder} and it will be made again"
    manifest = _read(folder, fix)
    inputs = open_array(folder, manifest.splits[split], fix=fix)
    targets = inputs if _scores_corrupted(corpus, config) else corpus[split]
    return Contaminated(inputs, targets, manifest.reports[split])


def contaminate_stream(
    corpus: Corpus, stream: Tokens, name: str, config: ContaminationConfig | None = None
) -> Contaminated:
    """Corrupt a further text, given in the token ids of the corpus; nothing is stored.

    Text, name, seed and rate determine the result.
    """
    config = config or ContaminationConfig()
    inputs, report = _swapped(corpus, stream, name, config)
    return Contaminated(inputs, inputs if _scores_corrupted(corpus, config) else stream, report)


def settled(corpus: Corpus, config: ContaminationConfig) -> ContaminationConfig:
    """Return the config with the rate and the targets that None stands for in this corpus."""
    targets: Literal["clean", "corrupted"] = (
        "corrupted" if _scores_corrupted(corpus, config) else "clean"
    )
    return replace(config, rate=_rate(corpus, config), targets=targets)


def _scores_corrupted(corpus: Corpus, config: ContaminationConfig) -> bool:
    """Return True where the corrupted text is also the text to predict."""
    return (config.targets or ("corrupted" if corpus.kind == "words" else "clean")) == "corrupted"


def _swapped(
    corpus: Corpus, clean: Tokens, name: str, config: ContaminationConfig
) -> tuple[Tokens, SwapReport]:
    generator = np.random.Generator(np.random.PCG64(derive_seed(config.seed, name)))
    rate = _rate(corpus, config)
    if isinstance(corpus.vocabulary, WordVocabulary):
        return swap_words(clean, corpus.vocabulary, rate, generator, early_stop=config.early_stop)
    return swap_bytes(clean, corpus.vocabulary, rate, generator)


def _rate(corpus: Corpus, config: ContaminationConfig) -> float:
    return config.rate or (WORD_RATE if corpus.kind == "words" else BYTE_RATE)


def _label(corpus: Corpus, config: ContaminationConfig) -> str:
    exact = "-exact" if corpus.kind == "words" and not config.early_stop else ""
    return f"rate{_rate(corpus, config)!r}-seed{config.seed}{exact}"


def _read(folder: Path, fix: str) -> ContaminationManifest:
    manifest = read_record(folder / MANIFEST, ContaminationManifest, fix=fix)
    found = (manifest.format, manifest.version)
    check_record(folder / MANIFEST, found, (FORMAT, VERSION), fix)
    return manifest


def _clean_sha256(corpus: Corpus) -> dict[str, str]:
    return {split: corpus.manifest.splits[split].sha256 for split in CORRUPTED_SPLITS}


def _done(corpus: Corpus, folder: Path) -> bool:
    """Return True where the folder holds complete corrupted arrays of this corpus."""
    try:
        manifest = _read(folder, fix="")
        for record in manifest.splits.values():
            check_array(folder, record, fix="")
    except UserError:
        return False
    return manifest.clean_sha256 == _clean_sha256(corpus)


def _write(corpus: Corpus, config: ContaminationConfig, folder: Path) -> None:
    rate, splits, reports = _rate(corpus, config), {}, {}
    for split in CORRUPTED_SPLITS:
        clean = corpus[split]
        corrupted, report = _swapped(corpus, clean, split, config)
        path = folder / f"{split}.npy"
        write_array(path, clean.dtype, len(corrupted), [corrupted])
        splits[split] = describe_array(path, len(corrupted), clean.dtype)
        reports[split] = report
    manifest = ContaminationManifest(
        rate=rate,
        seed=config.seed,
        early_stop=config.early_stop,
        clean_sha256=_clean_sha256(corpus),
        splits=splits,
        reports=reports,
    )
    write_record(folder / MANIFEST, manifest)
