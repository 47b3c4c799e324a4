"""The claims of the paper, each with the settings of our studies that test it.

A claim has the paper's two figures (Tables 1 to 4 and its appendix) and the length of its training.
The paper trained one seed of each model, so that its effects have no interval.
"""

from dataclasses import dataclass
from typing import Literal

BYTES, SMALL, MEDIUM, GLAM = 80_000 * 24_576, 40_000 * 24_576, 80_000 * 24_576, 60_000 * 24_576
SWIN, SOFT = 60 * 1_281_167, 300 * 1_281_167  # epochs of ImageNet's training images


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure of the paper for the plain and the adaptive router, and how we measured it.

    plain    of the paper, as `adaptive`; None: an idea of our own, which predicts a gain
    unit     percent: differences are in percent of the plain router's mean, below 0 is better;
             points: differences of accuracies, above 0 is better
    length   tokens, or images, that the paper's model was trained on
    """

    title: str
    study: str
    metric: str
    settings: tuple[str, ...]
    plain: float | None
    adaptive: float | None
    unit: Literal["percent", "points"]
    length: int
    condition: str = "adaptive-previous"
    baseline: str = "smoe"

    @property
    def effect(self) -> float | None:
        """The paper's difference, in the claim's unit; None for an idea of our own."""
        if self.plain is None or self.adaptive is None:
            return None
        difference = self.adaptive - self.plain
        return 100 * difference / self.plain if self.unit == "percent" else difference


_BYTES = {"plain": 1.153, "adaptive": 1.137, "unit": "percent", "length": BYTES, "metric": "test"}
_SHORT_BYTES = tuple(
    f"switch-enwik8, {name}"
    for name in (
        "post-norm, balance 0",
        "post-norm, balance 0, published init",
        "post-norm, balance 0.01",
        "pre-norm, balance 0",
        "pre-norm, balance 0.01",
    )
)
_LONG_BYTES = ("switch-enwik8, balance 0.01", "switch-enwik8, balance 0")
_SMALL = ("switch-small, dropout 0.1", "switch-small, dropout 0.7")


def _claim(title: str, study: str, settings: tuple[str, ...], **values: object) -> Claim:
    return Claim(title=title, study=study, settings=settings, **values)  # type: ignore[arg-type]


def _words(title: str, study: str, settings: tuple[str, ...], **values: object) -> Claim:
    return _claim(title, study, settings, metric="test", unit="percent", **values)


def _points(
    title: str, settings: tuple[str, ...], plain: float, adaptive: float, **values: object
) -> Claim:
    figures = {"plain": plain, "adaptive": adaptive, "unit": "points", "length": SWIN, **values}
    return _claim(title, "vision", settings, **figures)


CLAIMS: tuple[Claim, ...] = (
    _claim("EnWik-8 bits per byte, long runs", "long", _LONG_BYTES, **_BYTES),
    _claim(
        "the same, statistics of the current layer",
        "long",
        _LONG_BYTES,
        condition="adaptive-current",
        **_BYTES,
    ),
    _claim(
        "the published model against its control",
        "long",
        ("switch-enwik8, published",),
        condition="published",
        baseline="published-control",
        **_BYTES,
    ),
    _claim(
        "our own idea: M fades to the identity, long runs",
        "long",
        _LONG_BYTES,
        condition="fade",
        **{**_BYTES, "plain": None, "adaptive": None},
    ),
    _claim("EnWik-8 bits per byte, short runs", "bytes", _SHORT_BYTES, **_BYTES),
    _words(
        "WikiText-103 perplexity, Switch-small, long runs",
        "long-words",
        _SMALL,
        plain=87.94,
        adaptive=85.07,
        length=SMALL,
    ),
    _words(
        "WikiText-103 perplexity, Switch-medium, long runs",
        "long-words",
        ("switch-medium",),
        plain=35.48,
        adaptive=34.42,
        length=MEDIUM,
    ),
    _words(
        "WikiText-103 perplexity, GLaM-small, long runs",
        "long-words",
        ("glam-small",),
        plain=58.27,
        adaptive=54.55,
        length=GLAM,
    ),
    _words(
        "WikiText-103 perplexity, Switch-small, short runs",
        "words",
        _SMALL,
        plain=87.94,
        adaptive=85.07,
        length=SMALL,
    ),
    _words(
        "WikiText-103 perplexity, GLaM-small, short runs",
        "words",
        ("glam-small, dropout 0.1",),
        plain=58.27,
        adaptive=54.55,
        length=GLAM,
    ),
    *(
        _claim(
            f"{title} accuracy after finetuning",
            "words",
            _SMALL[:1],
            metric=metric,
            unit="points",
            plain=plain,
            adaptive=adaptive,
            length=MEDIUM,
        )
        for title, metric, plain, adaptive in (
            ("SST-2", "sst2", 76.27, 77.32),
            ("SST-5", "sst5", 39.13, 40.04),
            ("Banking-77", "banking77", 83.82, 86.01),
        )
    ),
    _points("ImageNet top-1, Swin", ("swin, two experts",), 76.10, 76.31, metric="test"),
    _points("ImageNet top-1, Swin, one expert", ("swin, one expert",), 75.22, 75.39, metric="test"),
    _points("ImageNet top-1, SoftMoE", ("softmoe",), 72.86, 73.21, metric="test", length=SOFT),
    _points("PGD 1/255, Swin", ("swin, two experts",), 40.85, 43.74, metric="pgd-paper 1/255"),
    _points("FGSM 1/255, Swin", ("swin, two experts",), 54.70, 55.78, metric="fgsm-paper 1/255"),
    _points("SPSA 1, Swin", ("swin, two experts",), 60.57, 63.47, metric="spsa-paper 1"),
)
