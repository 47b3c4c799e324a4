"""Runs as a folder would tell them, without a folder; and a text that tries to leave its page."""

from pathlib import Path
from typing import Any

from acmoe.report.runs import RunFacts
from acmoe.report.scores import Score

HOSTILE = (
    "</script><script>window.broken = 1</script><img src=x onerror=alert(1)> & \u2028 \t{{DATA}}"
)


def run_facts(
    values: dict[int, float],
    *,
    router: str = "smoe",
    seed: int = 0,
    steps: int | None = None,
    name: str = "run",
    key: str = "bits_per_byte",
    in_use: bool = False,
    tested: tuple[Score, ...] = (),
    **settings: Any,
) -> RunFacts:
    """A run validated at those steps with those values; it is finished unless `steps` says more."""
    return RunFacts(
        folder=Path(name),
        name=name,
        kind="language-run",
        settings={"model.router.name": router, "seed": seed, "lr": 0.1, **settings},
        train=(),
        valid=tuple({"kind": "valid", "step": s, key: v, "loss": 1.0} for s, v in values.items()),
        steps=max(values, default=0) if steps is None else steps,
        in_use=in_use,
        notes=(),
        tested=tested,
    )


def scored(value: float, *, step: int = 1, statistics: str = "none", protocol: str = "") -> Score:
    """A test score in bits per byte."""
    return Score(
        label="test bits per byte",
        lower=True,
        value=value,
        step=step,
        statistics=statistics,
        protocol=protocol,
        source="evaluation.json",
    )
