"""The processes of a run: which one this is, and what they tell one another."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Process number `rank` of `size`. Every method must be called by all of them, in one order.

    Without torch.distributed, `mesh` is None, and every method returns what one process would.
    """

    rank: int = 0
    size: int = 1
    mesh: "DeviceMesh | None" = None  # (pipeline, replicate, expert)
    data: "DeviceMesh | None" = None  # (data,) the processes of this pipeline stage
    # A group of its own for the statistics of the routers, over the same processes as `data`.
    statistics: ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Return True on the process that writes the files and speaks to the user."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Return the number of the share of each batch that this process trains on."""
        return self.data.get_local_rank() if self.data is not None else 0

    @property
    def data_size(self) -> int:
        """Return into how many shares each batch is split."""
        return self.data.size() if self.data is not None else 1

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, without gradient."""
        if self.mesh is None:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def concatenate(self, value: Tensor) -> Tensor:
        """Return the tensors of all shares of the batch, of one shape, joined along dimension 0."""
        if self.data is None:
            return value
        parts = [torch.empty_like(value) for _ in range(self.data_size)]
        dist.all_gather(parts, value.contiguous(), group=self.data.get_group())
        return torch.cat(parts)

    def part(self, value: Tensor) -> Tensor:
        """Return this process's part of a result of `concatenate`.

        The result may come from a run with another number of processes.
        """
        if hasattr(value, "to_local"):
            return own_part(value)
        return value if self.data_size == 1 else value.chunk(self.data_size)[self.data_rank].clone()

    def sharded(self, value: Tensor) -> Tensor:
        """Return the result of `concatenate` as a DTensor, of which each process has its part."""
        if self.data is None:
            return value
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(value, self.data, [Shard(0)])

    def empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor to fill, laid out as `sharded` does where its rows can be dealt."""
        if self.data is None or shape[0] % self.data_size:
            return torch.empty(shape, dtype=dtype, device=device)
        own = (shape[0] // self.data_size, *shape[1:])
        return self.sharded(torch.empty(own, dtype=dtype, device=device))

    def add(self, *numbers: float) -> list[float]:
        """Return the sum of each number over all processes; the numbers are on the host."""
        if self.mesh is None:
            return list(numbers)
        # Tensors of the CPU go through gloo: the device is not waited for.
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(number) for number in total.tolist()]

    def largest(self, number: int) -> int:
        """Return the largest of the numbers of all processes."""
        if self.mesh is None:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, by rank."""
        if self.mesh is None:
            return [value]
        found: list[Value] = [value] * self.size
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Wait until all processes have come here."""
        self.largest(0)

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Run the body on rank 0, then on the others, which find the files that it wrote."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()


ALONE = Ranks()


def own_part(value: Tensor) -> Tensor:
    """Return the part of a DTensor that this process has; another tensor as it is."""
    return cast(Tensor, cast(Any, value).to_local()) if hasattr(value, "to_local") else value
