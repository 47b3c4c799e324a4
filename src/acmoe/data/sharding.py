"""Divide training and evaluation batches among ranks, and check the state of a resumed loader."""

from collections.abc import Iterable, Mapping

from acmoe.errors import check


def rank_rows(batch: int, *, rank: int, world_size: int, unit: str, split: int = 1) -> list[int]:
    """Return the rows of a global batch that belong to `rank`, an equal share of all `batch` rows.

    `split` is the number of micro-batches. Each rank gets a share of each of them, so that
    micro-batch p of all ranks together is micro-batch p of a single process.
    `unit` names the rows in error messages, such as "images".
    """
    check(batch >= 1, f"batch={batch} must be 1 or more {unit}")
    check(
        batch % (split * world_size) == 0,
        f"batch={batch} {unit} cannot be divided among world_size={world_size} ranks; use a "
        f"multiple of {split * world_size}",
    )
    check(0 <= rank < world_size, f"rank={rank} must lie below world_size={world_size}")
    part, local = batch // split, batch // split // world_size
    starts = [number * part + rank * local for number in range(split)]
    return [row for start in starts for row in range(start, start + local)]


def check_same_data(
    saved: Mapping[str, int], current: Mapping[str, int], keys: Iterable[str], *, what: str
) -> None:
    """Check that a saved loader state was taken with the same settings as the current loader."""
    for key in keys:
        check(
            saved[key] == current[key],
            f"the saved run read its {what} with {key}={saved[key]}, this one with"
            f" {key}={current[key]}; use the same",
        )
