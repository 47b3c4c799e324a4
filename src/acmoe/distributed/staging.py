"""Copies of tensors in host memory, in the same layout, for a thread that writes them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from acmoe.distributed.ranks import Ranks, own_part
from acmoe.distributed.whole import is_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Staging:
    """Makes copies, whose collectives have a group of their own; all processes must make one.

    The thread that writes must not come between the collectives of training.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.group: dist.ProcessGroup | None = None
        if ranks.mesh is None:
            return
        from torch.distributed.device_mesh import init_device_mesh

        self.group = dist.new_group(backend="gloo")
        names = ranks.mesh.mesh_dim_names
        self.mesh = ranks.mesh
        if ranks.mesh.device_type != "cpu":  # a DTensor is on the device of its mesh
            self.mesh = init_device_mesh("cpu", tuple(ranks.mesh.shape), mesh_dim_names=names)
        self.data = ranks.data
        if self.mesh is not ranks.mesh:
            self.data = self.mesh["replicate", "expert"]._flatten("data")

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies in host memory."""
        return {name: self._copy(value.detach()) for name, value in tensors.items()}

    def _copy(self, value: Tensor) -> Tensor:
        own = own_part(value)
        host = own.clone() if own.device.type == "cpu" else own.cpu()
        return self._placed(host, value) if is_part(value) else host  # type: ignore[arg-type]

    def _placed(self, host: Tensor, like: "DTensor") -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            host,
            self._host_mesh(like.device_mesh),
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def _host_mesh(self, mesh: "DeviceMesh") -> "DeviceMesh":
        """Return the mesh of the same processes on the host."""
        if self.mesh is self.ranks.mesh:
            return mesh
        names = mesh.mesh_dim_names
        assert names is not None and self.data is not None
        return self.data if names == ("data",) else self.mesh[names]
