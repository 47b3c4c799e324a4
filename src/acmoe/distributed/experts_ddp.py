"""DistributedDataParallel for a model whose experts are distributed (experts.py)."""

from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from acmoe.distributed.ranks import Ranks
from acmoe.distributed.whole import is_part

# torch 2.13 renames broadcast_buffers.
_SYNC = "forward_sync_buffers"
_SYNC = _SYNC if _SYNC in signature(DistributedDataParallel).parameters else "broadcast_buffers"
# Every process computes the same buffers from reduced statistics, so none has to be sent; gradients
# lie in the buckets that are reduced, so none is copied.
REPLICA_OPTIONS: dict[str, Any] = {_SYNC: False, "gradient_as_bucket_view": True}


class ReplicaWithExperts(DistributedDataParallel):
    """Averages the gradients of experts over the processes that hold the same ones.

    DistributedDataParallel takes no notice of them, because processes hold different experts. Call
    `average_experts` after the backward of the last micro-batch.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        assert ranks.mesh is not None
        assert ranks.data is not None
        ignored = [name for name, parameter in model.named_parameters() if is_part(parameter)]
        self._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
        super().__init__(model, process_group=ranks.data.get_group(), **REPLICA_OPTIONS)
        self.replicas = ranks.mesh["replicate"].get_group()

    @torch.no_grad()
    def average_experts(self) -> None:
        """Replace the gradients of experts by their mean over the processes that hold the same.

        The stacked weights of a layer are large: each goes in a reduction of its own, uncopied.
        """
        if self.replicas.size() == 1:
            return
        gradients = [
            cast(Any, parameter.grad).to_local()
            for parameter in self.module.parameters()
            if is_part(parameter) and parameter.grad is not None
        ]
        torch._foreach_div_(gradients, float(self.replicas.size()))
        works = [
            dist.all_reduce(gradient, group=self.replicas, async_op=True) for gradient in gradients
        ]
        for work in works:
            work.wait()
