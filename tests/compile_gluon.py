"""Compiles kernels in Gluon for a Hopper card, without one, and prints what came out as JSON.

    python tests/compile_gluon.py weights|table|keys|forward ...

Launches are those of the library, on a CPU's tensors: instead of running, a kernel is compiled for
the arguments it was launched with.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, mangle_type

from acmoe.kernels import attention_hopper, attention_keys, ring_launch, tuning
from acmoe.kernels.attention_kept import Kept, kept_band, kept_sizes
from acmoe.kernels.tiles import Plan
from acmoe.kernels.tuning import Ring
from acmoe.ops.attention_choice import fused_width, stored_width

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "maxnreg")
ROWS, EXPERTS = 512, 2
found: dict[str, dict[str, int]] = {}
what = ""  # is being launched


def compile_launch(
    kernel: JITFunction, *values: Any, grid: Any, warmup: bool, **named: Any
) -> None:
    """In place of `JITFunction.run`. What is not in Gluon may stay undone: memory is not read."""
    if not isinstance(kernel, GluonJITFunction):
        return
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    given = dict(zip([p.name for p in kernel.params], values, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name], constants[place,] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            attributes[place,] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, attributes)
    done = triton.compile(source, target=HOPPER, options=options)
    found[what] = {
        "shared": done.metadata.shared,
        "products": done.asm["ptx"].count("wgmma.mma_async"),
        "copies": done.asm["ptx"].count("cp.async.bulk.tensor"),
    }


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def plan() -> Plan:
    end = torch.arange(1, EXPERTS + 1) * (ROWS // EXPERTS)
    return Plan(torch.arange(ROWS), end, 1)


def ring(product: str, ring: Ring, dim: int, hidden: int) -> None:
    """A product of gated experts, by rings that are as long as the experts are wide."""
    up, down = bf16(EXPERTS, 2 * hidden, dim), bf16(EXPERTS, dim, hidden)
    x, h, a = bf16(ROWS, dim), bf16(ROWS, 2 * hidden), bf16(ROWS, hidden)
    if product == "hidden":
        ring_launch.hidden_by_ring(x, down, h, h, torch.zeros(ROWS, 1), plan(), ring)
    elif product == "down":
        ring_launch.rows_by_ring(a, down, plan(), ring, across=False)
    elif product == "input":
        ring_launch.rows_by_ring(h, up, plan(), ring, across=True)
    elif ring.gathers:
        rows = a if product == "down_weight" else h
        ring_launch.weights_of_tokens(x, rows, plan(), ring, turned=product == "up_weight")
    else:
        pair = (x, a) if product == "down_weight" else (h, x)
        ring_launch.weights_by_ring(*pair, plan(), ring)


def weights() -> None:
    global what
    what = "ring_down_weight"
    ring("down_weight", Ring("together", 4), 256, 256)


def table() -> None:
    """Every ring of the table, and that of the rule."""
    global what
    rows = {name: row for name, row in tuning.read_table(tuning.TABLE).items() if row is not None}
    rows = {name: Ring(*row) for name, row in rows.items() if name.startswith("ring_")}
    for what, one in (rows | {"ring_hidden/1024/512/8": tuning._HIDDEN_RING}).items():
        product, dim, hidden, _ = what.removeprefix("ring_").split("/")
        ring(product, one, int(dim), int(hidden))


def attention(features: int, keeps: bool) -> tuple[Any, ...]:
    """Queries, keys and values, what is kept; two streams of 256 behind a memory of 256."""
    q = bf16(2, 2, 256, fused_width(features))
    kv = bf16(2, 512, 2, 2, stored_width(features)).permute(2, 0, 3, 1, 4)
    weights, bases = kept_sizes(q.shape, 512, 256) if keeps else (0, (0,))
    return q, kv, Kept(bf16(weights), torch.zeros(bases))


def keys() -> None:
    global what
    for features in (16, 44):
        what = f"keys of {features}"
        q, kv, kept = attention(features, True)
        grad = bf16(2, 256, 2, stored_width(features)).transpose(1, 2)
        numbers = torch.zeros(2, 2, 256), torch.zeros(2, 2, 256), torch.empty_like(kept.weights)
        band = kept_band(q.shape, 512, 256)
        attention_keys.run_keys(q, kv[1], grad, kept, *numbers, *kv, band, 1.0, 1.0, features)


def forward() -> None:
    global what
    for features in (16, 44):
        for keeps in (False, True):
            what = f"forward of {features}, {'kept' if keeps else 'not kept'}"
            q, kv, kept = attention(features, keeps)
            mask = torch.ones(2, 512, dtype=torch.bool)
            bits = torch.zeros(2, 2, 256, dtype=torch.int32)
            positions = bf16(q.shape[-1], 256)
            attention_hopper.run_forward(q, *kv, positions, mask, bits, 0.1, 0.1, features, kept)


if __name__ == "__main__":
    assert not torch.cuda.is_available(), "launches on a CPU's tensors alone are compiled"
    JITFunction.run = GluonJITFunction.run = compile_launch
    groups: dict[str, Callable[[], None]] = {
        "weights": weights, "table": table, "keys": keys, "forward": forward,
    }  # fmt: skip
    for name in sys.argv[1:]:
        groups[name]()
    print(json.dumps(found, indent=1))
