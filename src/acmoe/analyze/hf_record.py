"""Run a model of transformers over batches and record what its routers read and choose.

B sequences of L tokens, N tokens counted in all, S of them whose router input is kept, D features,
E experts, K experts per token, C = E clusters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from acmoe.analyze.hf_text import Batch
from acmoe.analyze.measure.scale import cluster_scales
from acmoe.analyze.record import LayerRecord, RoutingRecord
from acmoe.errors import check
from acmoe.evaluate.statistics import own_statistics
from acmoe.runtime import evaluating

if TYPE_CHECKING:
    from acmoe.hf.discovery import RouterStack
    from acmoe.hf.observe import RouterCall

KEPT_TOKENS = 2000  # tokens whose router input is kept, drawn at random from all
NEXT_TOKEN = ("ForCausalLM", "ForConditionalGeneration")  # in the name of a class with such logits


@torch.no_grad()
def record_batches(
    model: nn.Module,
    stacks: list[RouterStack],
    batches: list[Batch],
    *,
    sample: str,
    layers: Sequence[int] | None,
    seed: int,
) -> RoutingRecord:
    """Run every batch once and join what its routers did."""
    count = sum(int(one.counted.sum()) for one in batches)
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:KEPT_TOKENS]
    rows_S = drawn.sort().values
    with evaluating(model):
        passes = list(_passes(model, stacks, batches, rows_S, _kept_routers(stacks, layers)))
    targets = sum(one.targets for one in passes)
    whole = zip(*(one.calls for one in passes), strict=True)
    return RoutingRecord(
        kind="tokens",
        layers=tuple(_layers(whole, rows_S)),
        token_ids=torch.cat([one.inputs["input_ids"].cpu()[one.counted] for one in batches]),
        pixels=None,
        labels=None,
        predicted=None,
        loss=sum(one.nats for one in passes) / targets if targets else None,
        statistics=own_statistics(model),
        batch=max(len(one.counted) for one in batches),
        block=max(one.counted.shape[1] for one in batches),
        sample=sample,
    )


class _Pass(NamedTuple):
    """One forward pass, without the tokens that do not count."""

    calls: list[RouterCall]  # one per MoE layer
    nats: float  # loss summed over the targets
    targets: int  # tokens that count and whose predecessor in the row is no padding


def _passes(
    model: nn.Module,
    stacks: list[RouterStack],
    batches: list[Batch],
    rows_S: Tensor,
    kept: set[str],
) -> Iterator[_Pass]:
    from acmoe.hf.observe import called_stack, observed

    done = 0  # tokens counted so far
    for batch in batches:
        real_N = batch.counted.flatten().nonzero()[:, 0]
        inside_S = (rows_S >= done) & (rows_S < done + len(real_N))
        own_S = real_N[rows_S[inside_S] - done]
        done += len(real_N)
        rows = {name: own_S if name in kept else own_S[:0] for name in _names(stacks)}
        with observed(stacks, rows, tokens=batch.counted.numel()) as calls:
            output = model(**_on_device(model, batch.inputs), use_cache=False)
        routers = called_stack(stacks, calls).routers
        yield _Pass(
            [calls[found.name].select(real_N) for found in routers],
            *_next_token_nats(model, output, batch),
        )


def _layers(whole: Iterable[tuple[RouterCall, ...]], rows_S: Tensor) -> Iterator[LayerRecord]:
    """Join the calls of each layer. A token's cluster is its first expert one MoE layer before."""
    before: LayerRecord | None = None
    for calls in whole:
        call = _joined(calls)
        rows = rows_S if len(call.input) else rows_S[:0]
        cluster_N = torch.full((len(call.ids),), -1) if before is None else before.first
        clusters = call.scores.shape[1] if before is None else before.num_experts
        scale_CD, varies = torch.ones(clusters, call.input.shape[1]), False
        if call.scale is not None:
            scale_CD, varies = cluster_scales(call.scale, cluster_N[rows], clusters)
        before = LayerRecord(
            input=call.input,
            scaled=call.input if call.scale is None else call.scaled,
            affinity=call.scores,
            expert_ids=call.ids,
            gate=torch.full(call.ids.shape, math.nan) if call.weights is None else call.weights,
            cluster=cluster_N,
            scale=scale_CD,
            scale_varies=varies,
            adaptive=call.scale is not None,
            grid=None,
            rows=rows,
        )
        yield before


def _joined(calls: Sequence[RouterCall]) -> RouterCall:
    """Return the calls of one router on all batches as one call."""
    joined: dict[str, Any] = {}
    for name in (field.name for field in fields(calls[0])):
        parts = [part for one in calls if (part := getattr(one, name)) is not None]
        joined[name] = torch.cat(parts) if parts else None
    return replace(calls[0], **joined)


def _names(stacks: list[RouterStack]) -> list[str]:
    return [found.name for stack in stacks for found in stack.routers]


def _kept_routers(stacks: list[RouterStack], layers: Sequence[int] | None) -> set[str]:
    """Return the names of the routers whose inputs are kept."""
    if layers is None:
        return set(_names(stacks))
    most = max(len(stack.routers) for stack in stacks)
    for layer in layers:
        check(1 <= layer <= most, f"layers={layer}; the model has MoE layers 1 to {most}")
    return {
        found.name
        for stack in stacks
        for number, found in enumerate(stack.routers, start=1)
        if number in layers
    }


def _next_token_nats(model: nn.Module, output: Any, batch: Batch) -> tuple[float, int]:
    """Return the summed loss and the number of targets; none where logits are of other tokens."""
    tokens_BL = batch.inputs["input_ids"]
    logits = getattr(output, "logits", None)
    named = any(part in type(model).__name__ for part in NEXT_TOKEN)
    if not named or logits is None or logits.shape[:2] != tokens_BL.shape:
        return 0.0, 0
    mask_BL = batch.inputs.get("attention_mask", torch.ones_like(tokens_BL)).cpu().bool()
    scored_BL = batch.counted[:, 1:] & mask_BL[:, :-1]
    total = 0.0
    for logits_LV, tokens_L, scored_L in zip(logits, tokens_BL, scored_BL, strict=True):
        at = scored_L.nonzero()[:, 0].to(logits.device)
        target = tokens_L.to(logits.device)[1:][at]
        total += float(functional.cross_entropy(logits_LV[at].float(), target, reduction="sum"))
    return total, int(scored_BL.sum())


def _on_device(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
