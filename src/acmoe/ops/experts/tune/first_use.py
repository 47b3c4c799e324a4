"""Decide whether a layer is tuned at its first use, and do so.

A layer that no table names runs by rules (settings/rules.py). On a GPU its first eager call first
times a few settings of each GEMM, forward and, where gradients are wanted, backward. That
takes seconds, most of them to compile, and is remembered in a file (cache.py), so that later
processes read it. The settings of a layer never change after its first call, but another machine,
or one whose file was removed, may choose others: results are then equal to rounding, not bitwise.
So nothing is measured, nor read from a file, under `torch.use_deterministic_algorithms`; rules
serve there. Nothing is measured while torch.compile traces, while a CUDA graph is captured, or in
distributed runs, whose ranks would wait for each other; there the files of earlier runs serve, and
otherwise the rules.
"""

import logging
import threading
import time

import torch
from torch import Tensor

from acmoe.config.environment import tuning_requested
from acmoe.errors import UserError
from acmoe.ops.experts.reference import ExpertWeights
from acmoe.ops.experts.settings import lookup, rules, tables
from acmoe.ops.experts.settings.rules import Layer
from acmoe.ops.experts.triton.sizes import Sizes, sizes_of
from acmoe.ops.experts.tune.inputs import Inputs
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.sort.reference import Rows

_log = logging.getLogger("acmoe")

# Layers with fewer operations in forward are left to the rules: they take less than about 0.3
# milliseconds, most of it launches, and tuning would take as long as a hundred thousand calls.
FEWEST_FLOPS = 2e11
_settled: set[tuple[Layer, str, bool]] = set()
# Calls of settled layers: the shapes of down and gate, the tokens' dtype, the activation, and
# whether gradients are wanted. They are found in less time than the layer.
_calls: set[tuple[object, ...]] = set()
MOST_CALLS = 4096
_lock = threading.Lock()


def forget() -> None:
    """Forget what this process has measured or read."""
    _settled.clear()
    _calls.clear()
    lookup.MEASURED.clear()


def prepare(x: Tensor, weights: ExpertWeights, rows: Rows, gate: Tensor, activation: str) -> None:
    """Tune this layer at its first use on a GPU, unless `unsuitable` has a reason against it."""
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return
    backward = records_gradient(x, weights.up, weights.down, gate)
    call = (weights.down.shape, gate.shape, x.dtype, activation, backward)
    if call in _calls or torch.cuda.is_current_stream_capturing():
        return
    size = sizes_of(x, weights.down, gate, activation)
    layer = size.layer(x.dtype)
    settled = (layer, activation, backward)
    with _lock:
        if settled not in _settled:
            _settled.add(settled)
            try:
                _settle(size, layer, x, weights, rows, gate, backward)
            except (UserError, KeyboardInterrupt):  # the next call asks again
                _settled.discard(settled)
                raise
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        _calls.add(call)


def unsuitable(size: Sizes, layer: Layer) -> str | None:
    """Return the reason why a layer is not tuned at all, or None."""
    if tuning_requested() == "never":
        return "ACMOE_TUNE=never"
    if torch.version.hip is not None:
        return "its candidates are for NVIDIA GPUs"
    if layer.dtype.itemsize != 2:
        return f"its tokens are {layer.dtype}"
    if layer.rows <= rules.FEW_ROWS:
        return "an average expert has few rows"
    if 2 * size.tokens * size.top_k * size.dim * (size.width + size.hidden) < FEWEST_FLOPS:
        return "it is small"
    if lookup.is_tuned(layer):
        return "a table names it"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are requested"
    return None


def _settle(
    size: Sizes,
    layer: Layer,
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    backward: bool,
) -> None:
    """Read the measured settings of this layer from the cache, or measure them and write them."""
    if unsuitable(size, layer) is not None:
        return
    from acmoe.ops.experts.tune import cache

    biased = weights.up_bias is not None or weights.down_bias is not None
    what = cache.identity(layer, size.act, biased, weights.up.dtype, x.device)
    known = lookup.MEASURED.get(layer) or cache.read(what)
    missing = [part for part, row in _PARTS[: 1 + backward] if row not in known]
    if missing and tuning_requested() == "auto" and not _distributed():
        known = known | _measure(missing, x, weights, rows, gate, size.act, known)
        if known:
            cache.write(what, known)
    if known:
        lookup.MEASURED[layer] = known


# The parts of a layer, and a row that is there once a part was measured.
_PARTS = (("forward", "up"), ("backward", "pipeline_input"))


def _distributed() -> bool:
    """Return True if other processes may wait for this one."""
    from torch import distributed

    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _measure(
    parts: list[str],
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    act: str,
    known: tables.Table,
) -> tables.Table:
    """Return the rows of these parts; none if the memory does not suffice."""
    from acmoe.ops.experts.tune.search import tune_backward, tune_forward

    what = f"experts of {x.shape[1]} features and {weights.down.shape[2]} hidden units"
    _log.warning(
        "tuning the kernels for %s, %s: up to a minute, once for this GPU; ACMOE_TUNE=never does "
        "without",
        *(what, " and ".join(parts)),
    )
    begin = time.perf_counter()
    given = _inputs(x, weights, rows, gate, act)
    found: tables.Table = {}
    try:
        with torch.random.fork_rng([x.device]):
            if "forward" in parts:
                found |= tune_forward(given)
            if "backward" in parts:
                first = (known | found).get("copy") or [False, False]
                found |= tune_backward(given)
                found["copy"] = [first[0], (found["copy"] or first)[1]]
    except torch.OutOfMemoryError:
        _log.warning("too little memory is free to tune the experts; the rules serve")
        return {}
    finally:
        torch.cuda.empty_cache()
    _log.info("tuned %s in %.0f seconds", what, time.perf_counter() - begin)
    return found


def _inputs(x: Tensor, weights: ExpertWeights, rows: Rows, gate: Tensor, act: str) -> Inputs:
    """Return the tensors of the call as the kernels read them: detached, in the dtype of x."""
    up_bias, down_bias = (
        None if one is None else one.detach().to(x.dtype)
        for one in (weights.up_bias, weights.down_bias)
    )
    return Inputs(
        x=x.detach().contiguous(),
        up=weights.up.detach().to(x.dtype).contiguous(),
        down=weights.down.detach().to(x.dtype).contiguous(),
        up_bias=up_bias,
        down_bias=down_bias,
        gate=gate.detach().contiguous(),
        rows=rows,
        act=act,
        result=weights.up.dtype,
    )
