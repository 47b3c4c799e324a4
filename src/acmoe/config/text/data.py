"""Configs of text data: how a corpus is prepared, and how its evaluation text is corrupted."""

from dataclasses import dataclass
from typing import Literal

from acmoe.errors import check


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Options of a corpus made from source files; the manifest has all but `allow_other_counts`.

    Attributes:
        min_count: words that occur fewer times in the training text become `<unk>`; 1 keeps all,
            also those of the validation or test text alone, as the published code does; words only.
        max_vocabulary: size of the vocabulary with `<eos>` and `<unk>`, most frequent words first;
            words only.
        limit: use only the first `limit` bytes of text; byte-level corpora only.
        allow_other_counts: accept a text whose counts are not those published under that name.
        title: name of the corpus in reports; empty: the published name, or that of the source.
    """

    min_count: int = 1
    max_vocabulary: int | None = None
    limit: int | None = None
    allow_other_counts: bool = False
    title: str = ""

    def __post_init__(self) -> None:
        check(self.min_count >= 1, f"min_count={self.min_count} must be 1 or more")
        check(
            self.max_vocabulary is None or self.max_vocabulary >= 3,
            f"max_vocabulary={self.max_vocabulary} must be 3 or more: <eos>, <unk> and a word",
        )
        check(
            self.limit is None or self.limit >= 40,
            f"limit={self.limit} must be 40 bytes or more: a twentieth of it has to hold two",
        )


@dataclass(frozen=True, kw_only=True)
class ContaminationConfig:
    """Options of corrupted validation and test splits. The training split stays clean.

    Attributes:
        rate: fraction of words or bytes replaced; None: 0.025 for words (the paper), 0.05 for
            bytes.
        seed: the same seed gives the same corrupted text, whatever the model.
        early_stop: words only: leave out the last swap of a line at random, as the paper's tool.
        targets: the text to predict; None: `corrupted` for words (the paper), and `clean` for
            bytes, where only the input is corrupted.
    """

    rate: float | None = None
    seed: int = 0
    early_stop: bool = True
    targets: Literal["clean", "corrupted"] | None = None

    def __post_init__(self) -> None:
        check(
            self.rate is None or 0.0 < self.rate < 1.0,
            f"rate={self.rate} must lie between 0 and 1: the fraction of words or bytes to "
            "replace, such as 0.025",
        )
        check(self.seed >= 0, f"seed={self.seed} must not be negative")
        check(
            self.targets in (None, "clean", "corrupted"),
            f"targets={self.targets!r} is not known; use clean or corrupted",
        )
