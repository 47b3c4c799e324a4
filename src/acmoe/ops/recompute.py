"""Activation checkpointing that saves routing choices: a recompute cannot reroute tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import acmoe.ops.route.autograd
import acmoe.ops.statistics.over_ranks  # noqa: F401, defines the sums over processes

# Operators that choose or communicate: their results are saved, all others are recomputed.
_CHOICES = (
    torch.ops.aten.topk.default,
    torch.ops.aten.max.dim,
    torch.ops.aten.sort.default,
    torch.ops.aten.sort.stable,
    torch.ops.aten.argmax.default,
    torch.ops.acmoe.route.default,
    torch.ops.acmoe.sum_over_ranks.default,
    torch.ops.acmoe.dispersion_over_ranks.default,
    torch.ops._c10d_functional.all_to_all_single.default,  # distributed/experts.py
)


def recompute(module: Callable[..., Any], *inputs: Any, **arguments: Any) -> Any:
    """Call the module, keeping its inputs and routing choices instead of its activations.

    Autocast's weight cache is off inside: with it, a second call in the same autocast region would
    find weights already cast and run fewer casts than the backward, which recomputes each call
    alone.
    """
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        return checkpoint(module, *inputs, use_reentrant=False, context_fn=contexts, **arguments)
    finally:
        torch.set_autocast_cache_enabled(keeps)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of operators that choose; recompute all others."""
    if op in _CHOICES:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
