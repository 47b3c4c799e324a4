"""The states of the random generators of a run, as tensors of its checkpoints."""

from collections.abc import Mapping

import torch
from torch import Tensor

from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.runtime import rng_states, set_rng_states


def rng_tensors(device: torch.device, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """Return the states of the CPU's and the device's global random generator.

    Dropout and routing noise draw from these generators. Those of rank r > 0 end in `@r`.
    """
    return {
        f"rng/{kind}" + (f"@{rank}" if rank else ""): state
        for rank, states in enumerate(ranks.gather(rng_states(device)))
        for kind, state in states.items()
    }


def own_rng(device: torch.device, ranks: Ranks) -> dict[str, Tensor]:
    """Return this process's part of what `rng_tensors` returns."""
    end = "" if ranks.first else f"@{ranks.rank}"
    return {f"rng/{kind}{end}": state for kind, state in rng_states(device).items()}


def restore_rng(tensors: Mapping[str, Tensor], device: torch.device, ranks: Ranks = ALONE) -> None:
    """Restore what `rng_tensors` returned; other tensors are ignored.

    A rank that the saved run did not have draws on from its own seed.
    """
    # A run saved on a CPU and resumed on a GPU has no such state, and no promise of equal bits.
    names = [name.removeprefix("rng/").partition("@") for name in tensors if name[:4] == "rng/"]
    kinds = [kind for kind, _, rank in names if int(rank or 0) == ranks.rank]
    end = "" if ranks.first else f"@{ranks.rank}"
    if kinds:
        set_rng_states({kind: tensors[f"rng/{kind}{end}"] for kind in kinds}, device)
