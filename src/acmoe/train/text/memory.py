"""The memory of text streams in a checkpoint, also of another number of micro-batches.

Tensors are named `memory/MICRO-BATCH/BLOCK` and `moments/MICRO-BATCH/BLOCK/NAME`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from acmoe.models.text.memory import Memory, StreamMemory
from acmoe.ops.statistics.prefix import PrefixMoments
from acmoe.storage.shards import Stored

STREAMS = ("memory/", "moments/")  # names of tensors with a row for each stream begin with these


def stream_tensors(
    memories: Sequence[StreamMemory | None], depths: Sequence[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and rows of the memory of each micro-batch, for blocks at these depths."""
    for part, memory in enumerate(memories):
        for depth, hidden in zip(depths, memory.hidden if memory else (), strict=False):
            yield f"memory/{part}/{depth}", hidden
        for depth, moments in zip(depths, memory.moments if memory else (), strict=False):
            for name, value in ({} if moments is None else moments._asdict()).items():
                yield f"moments/{part}/{depth}/{name}", value


def stored_streams(stored: Mapping[str, Stored], depths: Sequence[int]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint that are memory of the blocks at these depths."""
    own = {str(depth) for depth in depths}
    return {
        name: one
        for name, one in stored.items()
        if name.startswith(STREAMS) and name.split("/")[2] in own
    }


def saved_memory(
    tensors: Mapping[str, Tensor],
    part: int,
    depths: Sequence[int],
    own_rows: Callable[[Tensor], Tensor],
) -> Memory:
    """Return the saved memory of micro-batch `part`; moments are () where none were saved."""
    hidden = tuple(own_rows(tensors[f"memory/{part}/{depth}"]) for depth in depths)
    moments: list[PrefixMoments | None] = []
    for depth in depths:
        names = [f"moments/{part}/{depth}/{name}" for name in PrefixMoments._fields]
        saved = names[0] in tensors
        moments.append(PrefixMoments(*(own_rows(tensors[n]) for n in names)) if saved else None)
    return Memory(hidden, moments=tuple(moments) if any(moments) else ())


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
