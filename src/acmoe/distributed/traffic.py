"""Count the bytes that a training step gives to the collectives of torch.distributed."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators of torch.distributed: what each is called here, and the position of the argument that
# has the bytes: the whole tensor of a gather or scatter, not the part of one process.
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
}
_SILENT = {
    *("barrier", "monitored_barrier_", "recv_", "recv_any_source_", "wait_tensor"),
    "_wrap_tensor_autograd",  # the result of a collective
}


class CountTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with`, add up what this process gives to collectives and sends, in bytes.

        with CountTraffic() as traffic:
            loss = model(tokens)
            loss.backward()
            optimizer.step()
        traffic.bytes  # {"all_reduce": 1234, ...}

    An all_reduce or broadcast counts its tensor; an all_gather its result; a reduce_scatter or
    all_to_all its input; a send its tensor. `wire_bytes` says what then leaves a device. The
    backward of a GPU runs in another thread: there count around a step with
    `torch.autograd.set_multithreading_enabled(False)`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        space, name = func.namespace, func._schema.name.partition("::")[2]
        if space in ("c10d", "_c10d_functional") and name not in _SILENT:
            self._count(name, args)
        if space == "acmoe":  # an operator of this library may communicate: look inside
            key = _backend_key(args)
            with self:
                return func.redispatch(key, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in _OPERATORS:
            raise NotImplementedError(f"CountTraffic does not know the collective {name}")
        called, position = _OPERATORS[name]
        tensors = [one for one in tree_leaves(args[position]) if isinstance(one, Tensor)]
        size = sum(one.numel() * one.element_size() for one in tensors)
        if name == "all_gather_into_tensor":
            size *= args[1]  # the operator has the part of one process and the number of them
        self.bytes[called] += size
        self.calls[called] += 1


def wire_bytes(payload: Mapping[str, int], ranks: int) -> float:
    """Return the bytes that leave each of `ranks` devices if collectives go round a ring.

    An all_reduce sends each byte twice, but for the parts that are at home already.
    """
    away = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * away, "broadcast": 1.0, "send": 1.0}
    return sum(factor.get(name, away) * size for name, size in payload.items())


def _backend_key(args: tuple[Any, ...]) -> Any:
    """Return the dispatch key set of the device that the operator's tensors lie on."""
    device = next(one for one in tree_leaves(args) if isinstance(one, Tensor)).device
    keys = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}
    return torch._C.DispatchKeySet(keys[device.type])
