"""Train SMoE and ACMoE from the same seed, initial weights and data; only the router differs."""

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from acmoe.config.text.data import ContaminationConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.config.text.train import DataConfig, RunConfig
from acmoe.errors import check
from acmoe.evaluate.language_report import LanguageReport
from acmoe.evaluate.run import open_corpus, open_run
from acmoe.recipes.nano import nano_run
from acmoe.train.run import Summary
from acmoe.train.side_by_side.processes import Job, Outcome, run_one_by_one, run_side_by_side
from acmoe.train.threads import Threads

ROUTERS = {"SMoE": "smoe", "ACMoE": "adaptive"}
CORPUS_BYTES = 1_000_000  # bytes of the standard library; a twentieth of them is the test text
STEPS = 200  # both models together take about a minute on two laptop cores


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
        """Return the differences in words, with a warning that one seed proves little."""
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
    folder: Path | str,
    *,
    seed: int = 0,
    steps: int = STEPS,
    console: Console | None = None,
    parallel: Threads | None = None,
) -> Comparison:
    """Train both routers in `folder` (runs smoe and acmoe), then score them on the same texts.

    The same call continues an interrupted comparison. With `parallel` each router has a process of
    its own with these settings of the CPU; the results are those of one process with the same.
    """
    folder = Path(folder)
    check(steps >= 20, f"steps={steps}; fewer than 20 steps show no curve")
    base = base_run(folder, seed, steps)
    open_corpus(base.data)  # both processes would prepare it
    score = EvaluateConfig(contamination=ContaminationConfig(), routing=True)
    note = "" if parallel is None else parallel.message
    jobs = [
        Job(config=_with_router(base, router), folder=folder / name.lower(), score=score, note=note)
        for name, router in ROUTERS.items()
    ]
    if parallel is not None:
        outcomes = run_side_by_side(jobs, console, parallel)
    else:
        outcomes = run_one_by_one(jobs, console)
    reports = _reports(outcomes, folder)
    swaps = reports[0].contamination
    assert swaps is not None
    return Comparison(
        corpus=reports[0].corpus,
        seed=seed,
        steps=steps,
        tokens=steps * base.tokens_per_step,
        test_tokens=reports[0].figure().tokens,
        replaced=swaps.token_rate,
        rows=tuple(
            _row(name, report, outcome.summary)
            for name, report, outcome in zip(ROUTERS, reports, outcomes, strict=True)
        ),
        curves=tuple(_curve(name, folder / name.lower()) for name in ROUTERS),
        folder=str(folder),
    )


def base_run(folder: Path, seed: int, steps: int) -> RunConfig:
    """Return the run of SMoE; the run of ACMoE differs in the router only."""
    return replace(
        nano_run("switch-nano", "smoe"),
        data=DataConfig(name="stdlib", folder=str(folder / "data"), limit=CORPUS_BYTES),
        seed=seed,
        steps=steps,
        warmup=steps // 10,
        eval_every=max(1, steps // 10),
        eval_tokens=10_000,
        checkpoint_every=max(1, steps // 4),
    )


def _with_router(base: RunConfig, router: str) -> RunConfig:
    return replace(base, model=nano_run("switch-nano", router).model)


def _reports(outcomes: Sequence[Outcome], folder: Path) -> list[LanguageReport]:
    """Return the reports; end the process where a signal stopped the runs."""
    stopped = [one.summary for one in outcomes if one.report is None]
    if not stopped:
        return [one.report for one in outcomes if one.report is not None]
    where = ", ".join(f"{one.folder.name} at step {one.step} of {one.steps}" for one in stopped)
    if stopped[0].signal == signal.SIGINT:
        raise KeyboardInterrupt(
            f"{where}, saved in {folder}; give the same command again to continue"
        )
    raise SystemExit(128 + (stopped[0].signal or signal.SIGTERM))


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
