"""What a user may ask of the data room: how a source becomes a corpus, and how it is corrupted."""

from dataclasses import dataclass
from typing import Literal

from acmoe.errors import check


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How a source becomes a corpus; everything but `allow_other_counts` stands in the manifest.

    Attributes:
        min_count: words seen fewer times in the training text become `<unk>`; words only.
        max_vocabulary: most frequent symbols kept, `<eos>` and `<unk>` included; words only.
        limit: use only this many bytes of text; byte-level corpora only.
        allow_other_counts: accept a text whose counts are not those published under that name.
        title: how reports name the corpus; empty for the published name or the source's own.
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
    """How the validation and test splits are corrupted; the training split never is.

    Attributes:
        rate: share of words or bytes replaced; None is 0.025 for words (the paper) and 0.05 for
            bytes.
        seed: one seed gives one corrupted corpus, shared by every model.
        early_stop: words only: the paper's tool now and then leaves out the last swap of a line.
        targets: what the model has to predict; None is `corrupted` for words (the paper) and
            `clean` for bytes, where only the input is replaced.
    """

    rate: float | None = None
    seed: int = 0
    early_stop: bool = True
    targets: Literal["clean", "corrupted"] | None = None

    def __post_init__(self) -> None:
        check(
            self.rate is None or 0.0 < self.rate < 1.0,
            f"rate={self.rate} must lie between 0 and 1",
        )
        check(self.seed >= 0, f"seed={self.seed} must not be negative")
        check(
            self.targets in (None, "clean", "corrupted"),
            f"targets={self.targets!r} is not known; use clean or corrupted",
        )
