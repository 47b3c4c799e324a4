"""The claims of the paper, each with the settings of our studies that test it.

A claim has the paper's two figures (Tables 1 to 4 and its appendix) and the length of its training.
The paper's results are averages over 5 seeds. It gives no spread, so that its effects have no
interval.
"""

from dataclasses import dataclass
from typing import Literal

BYTES, SMALL, MEDIUM, GLAM = 80_000 * 24_576, 40_000 * 24_576, 80_000 * 24_576, 60_000 * 24_576
WIKIPEDIA = "enwiki15"  # text of the English Wikipedia of 2015, as bytes or as words
SWIN, SOFT = 60 * 1_281_167, 300 * 1_281_167  # epochs of ImageNet's training images


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure of the paper for the plain and the adaptive router, and how we measured it.

    plain    of the paper, as `adaptive`; None: an idea of our own, which predicts a gain
    unit     percent: differences are in percent of the plain router's mean, below 0 is better;
             points: differences of accuracies, above 0 is better
    length   tokens, or images, that the paper's model was trained on
    data     our data, where they are not those that `title` names
    declared    pairs that were declared before the runs: a row with fewer has no verdict.
                None: no number was declared
    decisive    False: declared as secondary, so that its rows never have a verdict
    own_spread  True: each setting has the spread of its own pairs, and not that of all settings
                that compare the same conditions in the study
    declaration  where the test of an idea of our own was declared: a link of the evidence page
    """

    title: str
    study: str
    metric: str
    settings: tuple[str, ...]
    plain: float | None
    adaptive: float | None
    unit: Literal["percent", "points"]
    length: int
    data: str = ""
    condition: str = "adaptive-previous"
    baseline: str = "smoe"
    declared: int | None = None
    decisive: bool = True
    own_spread: bool = False
    declaration: str = ""

    @property
    def effect(self) -> float | None:
        """The paper's difference, in the claim's unit; None for an idea of our own."""
        if self.plain is None or self.adaptive is None:
            return None
        difference = self.adaptive - self.plain
        return 100 * difference / self.plain if self.unit == "percent" else difference


_BYTES: dict[str, object] = {
    "plain": 1.153,
    "adaptive": 1.137,
    "unit": "percent",
    "length": BYTES,
    "metric": "test",
    "data": WIKIPEDIA,
}
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
_PAIRS = 4  # declared in both studies of long runs
_LONG: dict[str, object] = {**_BYTES, "declared": _PAIRS}
# A variant that is not in the paper, which therefore has no figures of it.
_OWN: dict[str, object] = {**_LONG, "plain": None, "adaptive": None}
_FADE: dict[str, object] = {
    **_OWN,
    "condition": "fade",
    "own_spread": True,
    "declaration": "studies/long.md#declared-before-its-runs-fade",
}
_SMALL = ("switch-small, dropout 0.1", "switch-small, dropout 0.7")
# Rates beside the paper's, to choose from. One pair was declared at each, and four at a rate that
# a condition chooses; all chose twice the paper's.
_RATE: dict[str, object] = {"decisive": False, "own_spread": True}
_HALF = ("half the rate", "rate 0.00035", {**_RATE, "declared": 1})
_TWICE = ("twice the rate", "rate 0.0014", {**_RATE, "declared": _PAIRS})


def _claim(title: str, study: str, settings: tuple[str, ...], **values: object) -> Claim:
    return Claim(title=title, study=study, settings=settings, **values)  # type: ignore[arg-type]


def _words(title: str, study: str, settings: tuple[str, ...], **values: object) -> Claim:
    figures = {"metric": "test", "unit": "percent", "data": WIKIPEDIA, **values}
    return _claim(title, study, settings, **figures)


def _points(
    title: str, settings: tuple[str, ...], plain: float, adaptive: float, **values: object
) -> Claim:
    figures = {"plain": plain, "adaptive": adaptive, "unit": "points", "length": SWIN, **values}
    return _claim(title, "vision", settings, data="Imagenette", **figures)


# The title's end and the condition of the paper's router, and of the one in the published code.
_ROUTERS = (
    ("", "adaptive-previous"),
    (", statistics of the current layer", "adaptive-current"),
)


def _long_bytes() -> list[Claim]:
    title = "EnWik-8 bits per byte, long runs"
    found = []
    for end, condition in _ROUTERS:
        claim = {**_LONG, "condition": condition}
        alone = {**claim, "own_spread": True}  # a run that diverges widens no other row
        constant = ("switch-enwik8, constant",)
        found += [
            _claim(f"{title}{end}", "long", _LONG_BYTES, **claim),
            _claim(
                f"{title} at a constant rate{end}",
                "long",
                constant,
                **{**alone, "declared": 2},
            ),
            *(
                _claim(
                    f"{title} at {name}{end}",
                    "long",
                    (f"switch-enwik8, {setting}",),
                    **{**claim, **rate},
                )
                for name, setting, rate in (_HALF, _TWICE)
            ),
        ]
    return found


def _long_words() -> list[Claim]:
    found = []
    for end, condition in _ROUTERS:
        claim: dict[str, object] = {"condition": condition, "declared": _PAIRS}
        small = {**claim, "plain": 87.94, "adaptive": 85.07, "length": SMALL}
        medium = {**claim, "plain": 35.48, "adaptive": 34.42, "length": MEDIUM}
        glam = {**claim, "plain": 58.27, "adaptive": 54.55, "length": GLAM}
        models = [
            ("Switch-small", _SMALL, small),
            *(
                (f"Switch-small at {name}", (f"switch-small, {setting}",), {**small, **rate})
                for name, setting, rate in (_HALF, _TWICE)
            ),
            ("Switch-medium", ("switch-medium",), medium),
            ("GLaM-small", ("glam-small",), glam),
        ]
        found += [
            _words(f"WikiText-103 perplexity, {model}, long runs{end}", "long-words", which, **more)
            for model, which, more in models
        ]
    return found


_ATTACKED = (
    ("Swin", "swin, two experts", SWIN),
    ("Swin, one expert", "swin, one expert", SWIN),
    ("SoftMoE", "softmoe", SOFT),
)
# An attack, its metric, and the paper's accuracies under it, plain and adaptive, of each model.
_ATTACKS = (
    ("PGD 1/255", "pgd-paper 1/255", ((40.85, 43.74), (39.69, 40.66), (45.29, 48.25))),
    ("FGSM 1/255", "fgsm-paper 1/255", ((54.70, 55.78), (52.84, 53.43), (56.95, 59.01))),
    ("SPSA 1", "spsa-paper 1", ((60.57, 63.47), (59.92, 59.97), (66.59, 70.63))),
)

CLAIMS: tuple[Claim, ...] = (
    *_long_bytes(),
    _claim(
        "EnWik-8 bits per byte, the published model against its control",
        "long",
        ("switch-enwik8, published",),
        condition="published",
        baseline="published-control",
        **{**_LONG, "declared": 2},
    ),
    # Its rule (docs/studies/long.md): one paired t test of four pairs, in one setting.
    _claim(
        "our own idea: M fades to the identity, long runs",
        "long",
        _LONG_BYTES[:1],
        **_FADE,
    ),
    _claim(
        "our own idea: M fades to the identity, long runs, secondary",
        "long",
        _LONG_BYTES[1:],
        decisive=False,
        **_FADE,
    ),
    _claim(
        "our own idea: the nearest expert in M, long runs",
        "long",
        _LONG_BYTES[:1],
        condition="distance",
        **_OWN,
    ),
    *_long_words(),
    _claim("EnWik-8 bits per byte, short runs", "bytes", _SHORT_BYTES, **_BYTES),
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
            f"{title} accuracy after finetuning, Switch-medium in the paper",
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
    *(
        _points(f"{attack}, {model}", (setting,), plain, adaptive, metric=metric, length=length)
        for attack, metric, figures in _ATTACKS
        for (model, setting, length), (plain, adaptive) in zip(_ATTACKED, figures, strict=True)
    ),
)
