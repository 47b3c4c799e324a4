"""Train SMoE and ACMoE from the same seed, initial weights and data; only the router differs."""

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
from acmoe.train.run import Summary, train

ROUTERS = {"SMoE": "smoe", "ACMoE": "adaptive"}
CORPUS_BYTES = 2_000_000  # bytes of the standard library; a twentieth of them is the test text
STEPS = 300  # both models take about two minutes on two laptop cores


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one router on the test text."""

    router: str
    bits_per_byte: float
    contaminated: float  # bits per byte when some input bytes are replaced
    load_balance: float  # standard deviation of expert shares in percent points, mean over layers
    instability: float  # share of token pairs that split or join between layers, mean over layers
    chance: float  # instability of random clusters of the same sizes
    seconds_per_step: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The validation curve of one router."""

    router: str
    steps: tuple[int, ...]
    values: tuple[float, ...]  # bits per byte of the validation text


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The figures of both routers, and a verdict on what they show."""

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
        """The differences in words, with a warning that one seed proves little."""
        smoe, acmoe = self.rows
        return (
            f"ACMoE minus SMoE: {acmoe.bits_per_byte - smoe.bits_per_byte:+.4f} bits per byte on "
            f"clean text, {acmoe.contaminated - smoe.contaminated:+.4f} on contaminated text. This "
            f"is one seed ({self.seed}) of a short run: it shows that both routers train, not "
            "which is better. That takes several seeds, their spread and a paired test."
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the verdict."""
        return {**asdict(self), "verdict": self.verdict}


def compare(
    folder: Path | str, *, seed: int = 0, steps: int = STEPS, console: Console | None = None
) -> Comparison:
    """Train both routers in `folder` (runs smoe and acmoe), then score them on the same texts.

    The same call continues an interrupted comparison.
    """
    folder = Path(folder)
    check(steps >= 20, f"steps={steps}; fewer than 20 steps show no curve")
    base = _base_run(folder, seed, steps)
    reports, rows, curves = [], [], []
    for name, router in ROUTERS.items():
        run = folder / name.lower()
        summary = _trained(_with_router(base, router), run, console)
        report = evaluate(run, EvaluateConfig(contamination=ContaminationConfig(), routing=True))
        reports.append(report)
        rows.append(_row(name, report, summary))
        curves.append(_curve(name, run))
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


def _base_run(folder: Path, seed: int, steps: int) -> RunConfig:
    """Return the run of SMoE; the run of ACMoE differs in the router only."""
    return replace(
        nano_run("switch-nano", "smoe"),
        data=DataConfig(name="stdlib", folder=str(folder / "data"), limit=CORPUS_BYTES),
        seed=seed,
        steps=steps,
        warmup=steps // 10,
        eval_every=max(1, steps // 10),
        eval_tokens=20_000,
        checkpoint_every=max(1, steps // 4),
    )


def _with_router(base: RunConfig, router: str) -> RunConfig:
    return replace(base, model=nano_run("switch-nano", router).model)


def _trained(config: RunConfig, folder: Path, console: Console | None) -> Summary:
    """Train to the end; end the process where a signal stopped the run."""
    summary = train(config, folder, console=console)
    if summary.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if summary.signal is not None:
        raise SystemExit(128 + summary.signal)
    return summary


def _curve(router: str, run: Path) -> Curve:
    records = open_run(run).metrics("valid")
    return Curve(
        router=router,
        steps=tuple(record["step"] for record in records),
        values=tuple(record["bits_per_byte"] for record in records),
    )


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
