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
# They say how a run is computed, and change its figures by no more than rounding.
_EXECUTION = {"compile", "graph", "keep", "log_every", "checkpoint_every", "parallel", "on_device"}


def check_comparable(records: Sequence[Record]) -> None:
    """Raise a UserError where two runs of one seed differ in data, training or tests."""
    first: dict[int, Record] = {}
    for record in records:
        one = first.setdefault(record["seed"], record)
        for key, before, now in _differences(one, record):
            check(
                False,
                f"{record['setting']}, seed {record['seed']}: {one['condition']} has {key}="
                f"{before!r}, and {record['condition']} has {now!r}; pairs may differ in their "
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

    So are empty values: `--brief` leaves out tasks and attacks, and then there are no such figures.
    """
    for key in left.keys() & right.keys() - _ROUTER - _EXECUTION:
        one, other = left[key], right[key]
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _in_both(one, other, f"{under}{key}.")
        elif one != other and one not in (None, []) and other not in (None, []):
            yield f"{under}{key}", one, other
