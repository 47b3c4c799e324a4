"""Check that the runs of a pair differ in nothing but their router.

A results file may hold runs of several commands. Options such as `model.dim=64` or `--tokens 500`
are no part of a run's setting or size, so that runs with and without them would form pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from acmoe.errors import check
from acmoe.lab.study.results.records import Record

# Conditions of the studies are routers, where they stand, and how they are trained.
_ROUTER = {"router", "placement", "plain_router", "router_lr", "router_optimizer", "oracle"}
# These options say how a run is computed, and change its figures by no more than rounding.
_EXECUTION = {"compile", "graph", "keep", "log_every", "checkpoint_every", "parallel", "on_device"}


def check_comparable(records: Sequence[Record]) -> None:
    """Raise a UserError where two runs of one seed differ in data, training or tests."""
    before: dict[int, list[Record]] = {}
    for record in records:
        seen = before.setdefault(record["seed"], [])
        for one in seen:
            _check_pair(one, record)
        seen.append(record)


def _check_pair(one: Record, other: Record) -> None:
    for key, before, now in _differences(one, other):
        check(
            False,
            f"{other['setting']}, seed {other['seed']}: {one['condition']} has {key}="
            f"{before!r}, and {other['condition']} has {now!r}; pairs may differ in their "
            "router alone: move the lines of one of them into another file",
        )


def _differences(one: Record, other: Record) -> Iterator[tuple[str, Any, Any]]:
    for part in ("config", "tests", "data"):
        left, right = ({part: record.get(part)} for record in (one, other))
        yield from _in_both(left, right)


def _in_both(
    left: Mapping[str, Any], right: Mapping[str, Any], under: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path of each differing field; fields that only later versions write are skipped.

    So are empty tests: `--brief` leaves out tasks and attacks, and then there are no such figures.
    In a config an empty value is an option like others, such as no clipping.
    """
    for key in left.keys() & right.keys() - _ROUTER - _EXECUTION:
        one, other = left[key], right[key]
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _in_both(one, other, f"{under}{key}.")
        elif one != other and (under.startswith("config.") or not _empty(one, other)):
            yield f"{under}{key}", one, other


def _empty(one: object, other: object) -> bool:
    return any(value is None or value == [] for value in (one, other))
