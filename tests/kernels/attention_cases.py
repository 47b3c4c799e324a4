"""Queries, keys and values for the kernels of sliding-window attention, and their gradients.

Shapes: B streams, H heads, L queries, S keys before them, N = S + L, W span, P features of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    before: int  # S
    queries: int  # L
    span: int
    features: int = 6
    streams: int = 2
    heads: int = 2


def draw(shape: Shape, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, table and a gradient of the output."""
    generator = torch.Generator().manual_seed(sum(shape))
    lead, num_keys = (shape.streams, shape.heads), shape.before + shape.queries
    sizes = [
        (*lead, shape.queries, shape.features),
        (*lead, num_keys, shape.features),
        (*lead, num_keys, shape.features),
        (shape.features, shape.span),
        (*lead, shape.queries, shape.features),
    ]
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def padding(shape: Shape, device: str) -> Tensor:
    """Holes anywhere; one stream sees nothing before its own segment, as with empty memory."""
    generator = torch.Generator().manual_seed(1)
    mask_BN = torch.rand(shape.streams, shape.before + shape.queries, generator=generator) > 0.4
    mask_BN[-1, : shape.before] = False
    return mask_BN.to(device)


def with_gradients(form, tensors: Sequence[Tensor], upstream: Tensor, **options) -> list[Tensor]:
    q, k, v, table = leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = form(q, k, v, positions=table, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
