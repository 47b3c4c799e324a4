"""Deal the memory of text streams in a checkpoint to another number of micro-batches."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

STREAMS = ("memory/", "moments/")  # names of tensors with a row for each stream begin with these


def saved_split(names: Iterable[str]) -> int:
    """Return the number of micro-batches whose memory a checkpoint has; 0 where it has none."""
    return len({name.split("/")[1] for name in names if name.startswith("memory/")})


def resplit(tensors: Mapping[str, Tensor], split: int) -> Mapping[str, Tensor]:
    """Deal the streams' memory in a checkpoint to another number of micro-batches.

    Micro-batches have the rows of the batch in order.
    """
    before = saved_split(tensors)
    if before in (0, split):
        return tensors
    found: dict[str, Tensor] = {}
    for name in tensors:
        kind, _, rest = name.partition("/")
        part, _, place = rest.partition("/")
        if f"{kind}/" not in STREAMS or part != "0":
            continue
        rows = torch.cat([tensors[f"{kind}/{one}/{place}"] for one in range(before)])
        for number, chunk in enumerate(rows.chunk(split)):
            found[f"{kind}/{number}/{place}"] = chunk
    return found
