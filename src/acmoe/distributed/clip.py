"""The norm of gradients that lie on different meshes of processes."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from acmoe.distributed.whole import by_mesh, gathered


def clip_gradients(parameters: Iterable[nn.Parameter], clip: float) -> Tensor:
    """Scale the gradients so that their norm is at most `clip`; return () the norm before that.

    It is `torch.nn.utils.clip_grad_norm_`, which takes parameters of one mesh only. All processes
    must call it, and get the same norm.
    """
    groups = by_mesh(parameters)
    if len(groups) == 1:
        return gathered(nn.utils.clip_grad_norm_(groups[0], clip))
    norms = [
        gathered(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))
        for group in groups
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, clip, norm)
    return norm
