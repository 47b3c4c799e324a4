"""Whole tensors from the parts that processes hold (DTensor), and back.

DTensor is imported where it is used: that takes 0.8 s, which a run in one process saves.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on the CPU if it is sharded, otherwise the tensor itself.

    All processes must call it.
    """
    return gathered(tensor).cpu() if is_part(tensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor on its device; all processes must call it."""
    if not is_part(tensor):
        return tensor
    found = cast(Any, tensor)
    # One dimension of the mesh after another: torch would do the same, and warn that it is slow.
    for dim in range(found.device_mesh.ndim - 1):
        found = found.redistribute(placements=_without(found.placements, dim))
    whole: Tensor = found.full_tensor()
    return whole


def _without(placements: Any, dim: int) -> list[Any]:
    """Return the placements with the tensor whole along dimension `dim` of the mesh."""
    from torch.distributed.tensor import Replicate

    return [Replicate() if each == dim else place for each, place in enumerate(placements)]


def is_part(tensor: object) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "full_tensor")


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by the mesh of processes that they lie on; None is a mesh as well.

    Functions of many tensors at once, such as a fused optimizer, take tensors of one mesh only.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return the state_dict of the model with whole tensors; all processes must call it."""
    return {
        name: whole(value.detach()) if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }


def load_whole_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state_dict of whole tensors; each process keeps its part."""
    own = model.state_dict()
    model.load_state_dict({name: like(value, own[name]) for name, value in state.items()})


def like(value: Any, own: Any) -> Any:
    """Return this process's part of a whole tensor if `own` is sharded and of the same shape."""
    if is_part(value) or not is_part(own) or own.shape != value.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    placed = value.to(own.device)
    # src_data_rank=None: every process has the whole tensor, so nothing is sent.
    return distribute_tensor(placed, own.device_mesh, own.placements, src_data_rank=None)


def is_sharded(model: nn.Module) -> bool:
    """Return True if a parameter of the model is sharded."""
    return any(map(is_part, model.parameters()))


def whole_model(model: nn.Module, build: Any) -> nn.Module:
    """Return the model itself, or if it is sharded an equal one of whole tensors on the CPU.

    `build()` makes a model of the same config. All processes must call it.
    """
    if not is_sharded(model):
        return model
    state = whole_state(model)
    with torch.device("meta"):
        found: nn.Module = build()
    found.load_state_dict(state, assign=True)
    return found.eval()  # no optimizer step moves its statistics
