"""Gradients and tensors of a model whose stages lie on several processes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acmoe.distributed.pipeline import pipeline_group, stage_rank
from acmoe.distributed.ranks import Ranks

BUCKET = 25 * 2**20  # bytes of gradients in one reduction, as in DistributedDataParallel


@torch.no_grad()
def reduce_gradients(
    own: Iterable[nn.Parameter], shared: Iterable[nn.Parameter], ranks: Ranks
) -> None:
    """Add the gradients of `shared` parameters over the stages; average all over the data.

    `shared` are the parameters that every stage uses, and that every process has a copy of.
    """
    for gradient in _gradients(shared):
        dist.all_reduce(gradient, group=pipeline_group(ranks))
    if ranks.data is None or ranks.data_size == 1:
        return
    for bucket in _buckets(_gradients([*own, *shared])):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=ranks.data.get_group())
        flat /= ranks.data_size
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def clip_gradients(
    own: Iterable[nn.Parameter], shared: Iterable[nn.Parameter], clip: float, ranks: Ranks
) -> Tensor:
    """Scale the gradients of all stages to a norm of at most `clip`; return () their norm before.

    The `shared` parameters of every stage have the same gradients, and count once.
    """
    own, shared = list(own), list(shared)
    counted = _gradients([*own, *shared] if stage_rank(ranks) == 0 else own)
    like = next(p for p in (*own, *shared) if p.requires_grad)
    norm = torch.nn.utils.get_total_norm(counted) if counted else like.new_zeros(())
    square = norm.to(like.device).square()
    dist.all_reduce(square, group=pipeline_group(ranks))
    total = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_([*own, *shared], clip, total)
    return total


def gather_stages(tensors: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return on rank 0 the tensors of all stages by name, and elsewhere those of this process.

    All processes must call it. A name that several stages have is taken from the first of them.
    """
    found = dict(tensors)
    if ranks.data_rank > 0:  # the pipeline of rank 0 has the same
        return found
    group = pipeline_group(ranks)
    own = [(name, value.shape, value.dtype) for name, value in tensors.items()]
    stages: list[Any] = [own] * dist.get_world_size(group)
    dist.all_gather_object(stages, own, group=group)
    seen: set[str] = set()
    for stage, listed in enumerate(stages):
        for name, shape, dtype in listed:
            if name not in seen and stage > 0:
                if ranks.first:
                    found[name] = torch.empty(shape, dtype=dtype)
                    dist.recv(found[name], group=group, group_src=stage)
                elif stage_rank(ranks) == stage:
                    value = tensors[name].detach().cpu().contiguous()
                    dist.send(value, group=group, group_dst=0)
            seen.add(name)
    return found


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of gradients of one dtype, and of at most BUCKET bytes or one gradient."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in sorted(gradients, key=lambda one: str(one.dtype)):
        size += gradient.nbytes
        if bucket and (size > BUCKET or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], gradient.nbytes
        bucket.append(gradient)
    if bucket:
        yield bucket
