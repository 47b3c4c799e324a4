"""SMoE and ACMoE side by side: same seed, first weights and data; the router alone differs."""

import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from acmoe.config.text.data import ContaminationConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.config.text.train import DataConfig, RunConfig
from acmoe.errors import check
from acmoe.evaluate.language import LanguageReport, evaluate
from acmoe.evaluate.run import open_run
from acmoe.recipes.nano import nano_run
from acmoe.train.loop import train
from acmoe.train.summary import Summary

ROUTERS = {"SMoE": "smoe", "ACMoE": "adaptive"}
CORPUS_BYTES = 2_000_000  # of the standard library; a twentieth of it is the test text
STEPS = 300  # both models take about two minutes on two laptop cores


@dataclass(frozen=True, kw_only=True)
class Row:
    """One router's figures on the test text."""

    router: str
    bits_per_byte: float
    contaminated: float  # bits per byte when some input bytes are replaced
    load_balance: float  # standard deviation of expert shares in percent points, mean over layers
    instability: float  # share of token pairs that part or meet between layers, mean over layers
    chance: float  # the instability of random clusters of the same sizes
    seconds_per_step: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How one router's validation loss fell."""

    router: str
    steps: tuple[int, ...]
    values: tuple[float, ...]  # bits per byte of the validation text


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both routers' figures, and what they do and do not show."""

    corpus: str
    seed: int
    steps: int
    tokens: int  # bytes of training text each model read
    test_tokens: int
    replaced: float  # share of the test bytes replaced in the contaminated text
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    folder: str

    @property
    def verdict(self) -> str:
        """The difference, and how little one seed says of it."""
        smoe, acmoe = self.rows
        return (
            f"ACMoE minus SMoE: {acmoe.bits_per_byte - smoe.bits_per_byte:+.4f} bits per byte on "
            f"clean text, {acmoe.contaminated - smoe.contaminated:+.4f} on contaminated text. This "
            f"is one seed ({self.seed}) of a short run: it shows that both routers train, not "
            "which is better. That takes several seeds, their spread and a paired test."
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def compare(
    folder: Path | str, *, seed: int = 0, steps: int = STEPS, console: Console | None = None
) -> Comparison:
    """Train both routers in `folder` (runs smoe and acmoe), then score them on the same texts.

    Interrupted, the same call continues where it was.
    """
    folder = Path(folder)
    check(steps >= 20, f"steps={steps}; fewer than 20 steps show no curve")
    base = nano_run("switch-nano", "smoe")
    base = replace(
        base,
        data=DataConfig(name="stdlib", folder=str(folder / "data"), limit=CORPUS_BYTES),
        seed=seed,
        steps=steps,
        warmup=steps // 10,
        eval_every=max(1, steps // 10),
        eval_tokens=20_000,
        checkpoint_every=max(1, steps // 4),
    )
    reports, rows, curves = [], [], []
    for name, router in ROUTERS.items():
        run = folder / name.lower()
        summary = _trained(_routed(base, router), run, console)
        report = evaluate(run, EvaluateConfig(contamination=ContaminationConfig(), routing=True))
        reports.append(report)
        rows.append(_row(name, report, summary))
        records = open_run(run).metrics("valid")
        curves.append(
            Curve(
                router=name,
                steps=tuple(record["step"] for record in records),
                values=tuple(record["bits_per_byte"] for record in records),
            )
        )
    swaps = reports[0].contamination
    assert swaps is not None
    return Comparison(
        corpus=reports[0].corpus,
        seed=seed,
        steps=steps,
        tokens=steps * base.tokens_per_step,
        test_tokens=reports[0].figure().tokens,
        replaced=swaps.token_rate,
        rows=tuple(rows),
        curves=tuple(curves),
        folder=str(folder),
    )


def _routed(base: RunConfig, router: str) -> RunConfig:
    return replace(base, model=nano_run("switch-nano", router).model)


def _trained(config: RunConfig, folder: Path, console: Console | None) -> Summary:
    summary = train(config, folder, console=console)
    if summary.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if summary.signal is not None:
        raise SystemExit(128 + summary.signal)
    return summary


def _row(router: str, report: LanguageReport, summary: Summary) -> Row:
    clean = report.figure()
    later = [layer for layer in clean.layers if layer.instability is not None]
    return Row(
        router=router,
        bits_per_byte=clean.value,
        contaminated=report.figure(contaminated=True).value,
        load_balance=fmean(layer.load_balance for layer in clean.layers),
        instability=fmean(layer.instability or 0.0 for layer in later),
        chance=fmean(layer.chance or 0.0 for layer in later),
        seconds_per_step=summary.seconds / summary.steps,
    )
