"""A claim and records for the tests of the evidence page."""

from typing import Any

from acmoe.lab.study.evidence.claims import Claim

CLAIM = Claim(
    title="bits",
    study="long",
    metric="test",
    settings=("a", "b"),
    plain=2.0,
    adaptive=1.9,  # -5 %
    unit="percent",
    length=1_000_000,
)


def record(condition: str, seed: int, test: float, **changes: Any) -> dict[str, Any]:
    made = {
        "digest": f"{condition}{seed}{changes.get('setting')}",
        "status": "done",
        "setting": "a",
        "size": "1,000 steps of 100 tokens",
        "condition": condition,
        "seed": seed,
        "metrics": {"test": test},
    }
    return made | changes
