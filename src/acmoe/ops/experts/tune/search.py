"""Time the candidates of each GEMM of a layer and return the settings of the fastest.

The result has the format of the tables (settings/tables.py): a row "up" or "down" for the blocks of
a Triton GEMM, "pipeline_down" for the pipeline of a Hopper GEMM (null where Triton's was faster),
and "copy" for [forward, backward].
"""

import contextlib
import logging
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops import device_support
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts.settings import lookup, rules
from acmoe.ops.experts.settings.gemms import GROUPED_MM, WEIGHT_GEMMS, PipelineConfig
from acmoe.ops.experts.settings.tables import Table
from acmoe.ops.experts.tune.calls import Call, backward_calls, forward_calls
from acmoe.ops.experts.tune.candidates import Settings, quick
from acmoe.ops.experts.tune.inputs import Inputs

_log = logging.getLogger("acmoe")

MOST_BLOCKS = 3  # blocks that are timed for a GEMM without a pipeline
_ROUNDS = 7
_QUEUE_CYCLES = 1_000_000  # about half a millisecond in which the host queues a call
_TOLERANCE = 2e-2  # relative error against the rule's result, as `acmoe bench` allows in bf16
# Widths W outside of which only one of copying and gathering is tried in the backward.
_MAYBE_COPIES, _MAYBE_GATHERS = 256, 2048


class Found(NamedTuple):
    """The fastest settings of a GEMM, and the milliseconds of a call."""

    settings: Settings
    ms: float


@contextlib.contextmanager
def trying(kernel: str, settings: Settings) -> Iterator[None]:
    """Make the GEMM use these settings inside `with`."""
    blocks, pipelines = dict(lookup.OVERRIDE), dict(lookup.PIPELINE_OVERRIDE)
    if isinstance(settings, Blocks):
        lookup.OVERRIDE[kernel], lookup.PIPELINE_OVERRIDE[kernel] = settings, None
    else:
        lookup.PIPELINE_OVERRIDE[kernel] = settings
    try:
        yield
    finally:
        lookup.OVERRIDE.clear()
        lookup.OVERRIDE.update(blocks)
        lookup.PIPELINE_OVERRIDE.clear()
        lookup.PIPELINE_OVERRIDE.update(pipelines)


@contextlib.contextmanager
def copying(*flags: bool) -> Iterator[None]:
    """Copy tokens in [forward, backward] or not inside `with`."""
    before = list(lookup.COPY_OVERRIDE)
    lookup.COPY_OVERRIDE[:] = flags
    try:
        yield
    finally:
        lookup.COPY_OVERRIDE[:] = before


@torch.no_grad()
def tune_forward(given: Inputs) -> Table:
    """Return the rows of "up" and "down", and the copy of the forward."""
    calls = forward_calls(given)
    layer = given.sizes.layer(given.x.dtype)
    tried = {}
    for copied in (False, True):
        with copying(copied, copied):
            tried[copied] = fastest("up", calls["up"], given, copied=copied)
    copied = min(tried, key=lambda flag: tried[flag].ms)
    with copying(copied, copied):
        down = fastest("down", calls["down"], given, copied=copied)
    backward = rules.copies(layer, backward=True)
    return {"copy": [copied, backward], **_rows("up", tried[copied]), **_rows("down", down)}


@torch.no_grad()
def tune_backward(given: Inputs) -> Table:
    """Return the rows of the backward's GEMMs; "copy" holds its second flag and a False."""
    calls = backward_calls(given)
    layer = given.sizes.layer(given.x.dtype)
    tried: dict[bool, dict[str, Found]] = {}
    for copied in _copies_to_try(layer.width):
        with copying(copied, copied):
            tried[copied] = {
                kernel: fastest(kernel, calls[kernel], given, copied=copied)
                for kernel in ("hidden", "down_weight", "up_weight")
            }
    copied = min(tried, key=lambda flag: sum(found.ms for found in tried[flag].values()))
    with copying(copied, copied):
        found = tried[copied] | {"input": fastest("input", calls["input"], given, copied=copied)}
    rows: Table = {"copy": [False, copied]}
    for kernel, one in found.items():
        rows |= _rows(kernel, one)
    return rows


def _copies_to_try(width: int) -> list[bool]:
    if width < _MAYBE_COPIES or width > _MAYBE_GATHERS:
        return [width > _MAYBE_GATHERS]
    return [False, True]


def _rows(kernel: str, found: Found) -> Table:
    if isinstance(found.settings, PipelineConfig):
        return {f"pipeline_{kernel}": list(found.settings)}
    blocks: Table = {kernel: list(found.settings)}
    return blocks if kernel == "up" else blocks | {f"pipeline_{kernel}": None}


def fastest(kernel: str, call: Call, given: Inputs, *, copied: bool) -> Found:
    """Return the fastest of the rule's settings and the few that the cost model prefers.

    A candidate that fails, or whose result differs from the rule's, is left out.
    """
    wanted = _routed(call(), given)
    tried = [
        one
        for one in _candidates(kernel, given, copied)
        if _agrees(kernel, one, call, given, wanted)
    ]
    times = _times(kernel, tried, call, given.x.device)
    best = min(range(len(tried)), key=lambda at: times[at])
    for one, ms in zip(tried, times, strict=True):
        _log.debug("tuning: %s %s copied=%s: %.3f ms", kernel, tuple(one), copied, ms)
    return Found(tried[best], times[best])


def _candidates(kernel: str, given: Inputs, copied: bool) -> list[Settings]:
    """Return the rule's settings, which serve without tuning, and the others that are timed.

    A pipeline that can run has nearly always been the fastest, so that only one Triton GEMM is
    timed beside it. torch's grouped GEMM is always timed where it can run.
    """
    layer = given.sizes.layer(given.x.dtype)
    pipelines: list[Settings] = []
    blocks: list[Settings] = [lookup.blocks_for(kernel, layer)]
    own = None if kernel == "up" else lookup.pipeline_for(kernel, layer)
    if own is not None and _runs(kernel, own, given, copied):
        pipelines.append(own)
    for one in quick(kernel, layer, tma=layer.aligned and device_support.has_large_shared_memory()):
        if isinstance(one, Blocks):
            blocks.append(one)
        elif _runs(kernel, one, given, copied):
            pipelines.append(one)
    most = 1 if any(one != GROUPED_MM for one in pipelines) else MOST_BLOCKS
    return list(dict.fromkeys([*pipelines, *list(dict.fromkeys(blocks))[:most]]))


def _runs(kernel: str, settings: PipelineConfig, given: Inputs, copied: bool) -> bool:
    """Return True if the Hopper kernel would run with these settings, and not Triton's instead."""
    from acmoe.ops.experts.hopper.choice import pipeline_unsupported

    gather = kernel in ("hidden", "down_weight", "up_weight") and not copied
    if kernel == "up_weight":
        gather = gather or settings.gathers
    if settings.gathers and not gather:
        return False  # these settings gather tokens, but the call has copied them already
    bias = {"hidden": given.up_bias is not None or given.down_bias is not None}
    bare = not bias.get(kernel, kernel == "down" and given.down_bias is not None)
    where = (kernel, given.sizes, given.x.dtype, given.x.device)
    result = given.result if kernel in WEIGHT_GEMMS else None
    with trying(kernel, settings):
        return pipeline_unsupported(*where, gather=gather, bare=bare, result=result) is None


def _agrees(
    kernel: str, one: Settings, call: Call, given: Inputs, wanted: Sequence[Tensor]
) -> bool:
    """Run the candidate once, which compiles it, and compare its result."""
    try:
        with trying(kernel, one):
            found = _routed(call(), given)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever Triton raises, only this candidate is left out
        _log.info("tuning: %s cannot run %s: %s", kernel, tuple(one), str(error).split("\n")[0])
        return False
    for mine, right in zip(found, wanted, strict=True):
        off, size = (
            torch.linalg.vector_norm(one, dtype=torch.float32) for one in (mine - right, right)
        )
        if not bool(off <= _TOLERANCE * size):
            _log.warning("tuning: %s with %s is wrong and left out", kernel, tuple(one))
            return False
    return True


def _routed(found: Sequence[Tensor], given: Inputs) -> list[Tensor]:
    """Return copies of the results, without rows of no expert, which the GEMMs do not write."""
    rows = given.rows.permutation.numel()
    end = int(given.rows.offsets[-1])
    return [(one[:end] if one.dim() == 2 and len(one) == rows else one).clone() for one in found]


def _times(kernel: str, tried: Sequence[Settings], call: Call, device: torch.device) -> list[float]:
    """Return the median milliseconds of each call.

    The calls are timed in turn, so that a change of the GPU's clock rate affects all of them.
    """
    samples: list[list[float]] = [[] for _ in tried]
    for _ in range(_ROUNDS):
        for one, times in zip(tried, samples, strict=True):
            with trying(kernel, one):
                times.append(_time(call, device))
    return [statistics.median(times) for times in samples]


def _time(call: Call, device: torch.device) -> float:
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_QUEUE_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
