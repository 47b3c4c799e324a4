"""Compiles the library's kernels for a card that need not be there, and prints what came out.

    python tests/compile_kernels.py 90 [--once] GROUP ...

--once compiles the first launch of each kernel alone.
GROUP is weights, experts, own, odd, wide, gates, text, images, measures, router, few, backward or
forward.

Tests interpret kernels or emulate them, which takes what the compiler may not. Here the library
runs on a CPU's tensors, and whatever it launches is compiled for the arguments of the launch
instead of run: results are zeros. 90 is the compute capability, times ten. One JSON object a kernel
and a use of it, by "FILE.KERNEL, USE".
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, mangle_type

import acmoe.ops
from acmoe.config.images.presets import vision_router
from acmoe.config.images.vision import SwinConfig
from acmoe.config.routing import AdaptiveConfig
from acmoe.config.text.language import LanguageConfig
from acmoe.lab.bench.shapes import SHAPES, find_shape
from acmoe.lab.bench.tune.calls import draw_inputs, kernel_calls
from acmoe.models.registry import build_model
from acmoe.ops import device_support
from acmoe.ops import dispatch as backend
from acmoe.ops.attention.hopper import forward as attention_hopper
from acmoe.ops.attention.hopper import keys as attention_keys
from acmoe.ops.attention.hopper.saved_weights import SavedWeights, saved_layout, saved_sizes
from acmoe.ops.attention.inputs import Inputs
from acmoe.ops.attention.ring import store_in_ring
from acmoe.ops.attention.support import fused_width, stored_width
from acmoe.ops.experts import clamped_swiglu
from acmoe.ops.experts.hopper import choice as hopper_choice
from acmoe.ops.experts.hopper import launch as hopper_launch
from acmoe.ops.experts.settings import tables
from acmoe.ops.experts.settings.gemms import PipelineConfig
from acmoe.ops.experts.triton.tiles import Plan
from acmoe.ops.experts.tune.calls import backward_calls
from acmoe.ops.route.autograd import route_op
from acmoe.ops.route.rescaled import rescaled_tokens
from acmoe.ops.route.set_rows import set_rows
from acmoe.ops.sort.op import sort_with_tokens_op
from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics.chosen import clusters_up_to_last
from acmoe.ops.statistics.mixed_scale import mixed_scale
from acmoe.ops.statistics.op import measure_dispersion
from acmoe.ops.statistics.optimum import theorem_weights
from acmoe.ops.statistics.scale_op import ScaleSettings, fused_cluster_scale
from acmoe.ops.statistics.set_op import set_cluster_scale, set_dispersion
from acmoe.ops.statistics.sorted_op import sorted_dispersion
from acmoe.ops.unit import unit_rows
from acmoe.routing.statistics.step import fold_statistics

OPTIONS = ("num_warps", "num_stages", "maxnreg")
CPU = torch.device("cpu")
found: dict[str, dict[str, Any]] = {}
target = GPUTarget("cuda", 90, 32)
use = ""  # what is being launched for
once = False  # compile the first launch of each kernel alone


def compile_launch(kernel: JITFunction, *values: Any, grid: Any, warmup: bool, **named: Any):
    """In place of `JITFunction.run`."""
    if once and any(name.split(",")[0] == _full(kernel) for name in found):
        return
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    given = dict(zip([p.name for p in kernel.params], values, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given.pop(parameter.name)
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (free and type(value) is int and value == 1):
            signature[parameter.name], constants[place,] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        even = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if free and type(even) is int and even % 16 == 0:
            attributes[place,] = [["tt.divisibility", 16]]
    assert not given, f"{kernel.__name__} is launched with options that are not known: {given}"
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(kernel, signature, constants, attributes)
    ptx = (done := triton.compile(source, target=target, options=options)).asm["ptx"]
    one = found.setdefault(
        f"{_full(kernel)}, {use}",
        {
            "gluon": language is GluonASTSource,
            "shared": 0,
            "products": 10**9,
            "copies": 10**9,
            "narrow": 0,
        },
    )
    # If one use has several launches, keep the worst figures.
    one["shared"] = max(one["shared"], done.metadata.shared)
    one["products"] = min(one["products"], ptx.count("wgmma.mma_async"))
    one["copies"] = min(one["copies"], ptx.count("cp.async.bulk.tensor"))
    one["narrow"] = max(one["narrow"], ptx.count("ld.global.b16") + ptx.count("st.global.b16"))


def _full(kernel: JITFunction) -> str:
    return f"{kernel.__module__.removeprefix('acmoe.ops.')}.{kernel.__name__}"


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def weights() -> None:
    """One GEMM with the Hopper pipeline: the quickest to compile."""
    global use
    use, rows = "weights", bf16(128, 256)
    plan = Plan(torch.arange(128), torch.tensor([64, 128]), 1)
    hopper_launch.launch_weights(rows, rows, plan, PipelineConfig("cooperative", 4))


def experts() -> None:
    """The products of the published layers, by the blocks and pipelines of the table.

    Two experts instead of up to 128, whose number no product is compiled for.
    """
    global use
    table = {f"{name.rpartition('/')[0]}/2": row for name, row in tables.package_table().items()}
    tables.package_table = lambda: table
    hopper_choice.gluon_unsupported = lambda device: None
    for name in ("olmoe", "qwen30b", "fine", "mixtral", "switch", "swin"):
        shape = replace(SHAPES[name], tokens=256, num_experts=2, top_k=2)
        for product, call in kernel_calls(shape, CPU, seed=0).items():
            use = f"{name} {product}"
            call()


def own() -> None:
    """Layers that nobody has tuned, narrow, wide and not gated, by blocks of the rule."""
    global use
    for name in ("256x512x512x2x2", "256x1024x4096x2x2", "256x352x352x2x2-relu", "32x512x512x2x2"):
        for product, call in kernel_calls(find_shape(name), CPU, seed=0).items():
            use = f"{name} {product}"
            call()


def gates() -> None:
    """The gate of GPT-OSS's experts, in both layouts."""
    global use
    for interleaved in (True, False):
        use = f"clamped gate, {'interleaved' if interleaved else 'concatenated'}"
        h = bf16(64, 64).requires_grad_()
        clamped_swiglu(h, alpha=1.702, limit=7.0, interleaved=interleaved).sum().backward()


def odd() -> None:
    """Layers of published models that nobody has tuned, by rules and pipelines; two experts."""
    global use
    hopper_choice.gluon_unsupported = lambda device: None
    for sizes in ("2048x1408", "2880x2880", "2048x512", "5120x8192", "4096x6400"):
        shape = find_shape(f"256x{sizes}x2x2")
        for product, call in kernel_calls(shape, CPU, seed=0).items():
            use = f"{sizes} {product}"
            call()


def wide() -> None:
    """Weight gradients in float32 for tokens in bf16, by pipelines and by blocks of the rule."""
    global use
    shape = find_shape("256x2048x1408x2x2")
    for name, reason in {"pipeline": None, "blocks": "left out"}.items():
        hopper_choice.gluon_unsupported = lambda device, reason=reason: reason
        hopper_choice._usable_settings.cache_clear()
        given = draw_inputs(shape, torch.Generator())._replace(result=torch.float32)
        for product, call in backward_calls(given).items():
            use = f"float32 {product} by {name}"
            call()


def text() -> None:
    """Steps of language models: attention, norms, routers, words; bf16, and float32."""
    global use
    routers = {
        "batch": AdaptiveConfig(),
        "running": AdaptiveConfig(statistics="running"),
        "prefix": AdaptiveConfig(statistics="prefix"),
    }
    for (name, router), lowered in zip(routers.items(), (True, True, False), strict=True):
        use = f"text {name}"
        sizes = {"dim": 64, "heads": 2, "hidden": 64, "repeats": 2, "span": 64, "block": 64}
        model = build_model(
            LanguageConfig(**sizes, vocab_size=300, num_experts=4, dropout=0.1, router=router)
        )
        ids = torch.zeros(16, 64, dtype=torch.int64)  # enough to sort them by cluster
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            first = model(ids, ids)
            out = model(ids, ids, memory=first.memory)
        (out.loss + out.aux_loss).backward()
        fold_statistics(model)
        use = f"decoding {name}"  # one token of each stream; then more than a program routes
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            model.eval()(ids[:, :1])
            model(ids[:1, :1])  # one token, as vectors
            model(ids)


def images() -> None:
    """A step of a Swin: windows of a map, a noisy gate."""
    global use
    use = "images"
    sizes = {"image_size": 56, "dim": 32, "depths": (2, 6), "heads": (2, 4), "num_classes": 10}
    config = SwinConfig(**sizes, num_experts=4, moe_stages=(1,), adaptive_stage=1)
    model = build_model(replace(config, router=vision_router("adaptive", config)))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.zeros(2, 3, 56, 56), torch.zeros(2, dtype=torch.int64))
    (out.loss + out.aux_loss).backward()


def measures() -> None:
    """Statistics of tokens that nobody has sorted, routers of many experts and of few tokens."""
    global use
    from acmoe.ops.route.triton.route import route
    from acmoe.ops.route.triton.tokens import Tokens

    assignment = torch.zeros(2, 64, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        use = f"route among 300, {dtype}"
        x, embedding, scale = (torch.zeros(n, 128, dtype=dtype) for n in (64, 300, 4))
        for how in ((None, None), (scale.float(), assignment[0])):
            route_op(x, embedding, None, *how, 2, True, None, 1.0, None, None)
        for tokens in (1, 64, 1000):  # features in ranges
            use = f"route {tokens} tokens, {dtype}"
            x, embedding, scale = (torch.zeros(n, 1024, dtype=dtype) for n in (tokens, 64, 4))
            cluster = torch.zeros(tokens, dtype=torch.int64)
            for how in ((None, None), (scale.float(), cluster)):
                read = Tokens.of(x, *how, None, None, None)
                for totals in ("none", "balance"):
                    route(read, embedding, None, 2, True, 1.0, totals=totals)
        use = f"rescaled tokens, {dtype}"
        for how in ((None, None), (torch.zeros(4, 128), assignment[0])):
            rescaled_tokens(
                torch.zeros(64, 128, dtype=dtype).requires_grad_(), *how
            ).sum().backward()
    use = "rows of unit length"
    unit_rows(torch.zeros(16, 352).requires_grad_()).sum().backward()
    use = "tokens of the experts"
    rescaled_tokens(bf16(64, 128).requires_grad_(), None, None, torch.bfloat16).sum().backward()
    use = "scale of each token"
    pairs = torch.zeros(64, 2, dtype=torch.int64)
    mixed_scale(torch.zeros(4, 128), pairs, torch.zeros(64, 2))
    theorem_weights(torch.zeros(4, 37, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))
    use, clusters = "many small clusters", 160
    x, cluster = bf16(32 * clusters, 1024).requires_grad_(), torch.zeros(32 * clusters).long()
    packed = sort_with_tokens_op(cluster[:, None], cluster, clusters)[4]
    order = TokenOrder.unpack(packed, clusters)
    sorted_dispersion(x.detach(), order)
    scale, choices = torch.zeros(clusters, 1024), (2, True, None, 1.0)
    where = (scale, cluster, *choices, None, None)
    route_op(x, bf16(300, 1024), None, *where)[1].sum().backward()
    use = "many experts, float32"  # the backward reads rescaled tokens as a split
    route_op(x, torch.zeros(300, 1024), None, *where)[1].sum().backward()
    for measure in ("mad", "variance", "std", "iqr"):
        use = f"measure {measure}"
        x = bf16(2, 64, 32).requires_grad_(measure != "iqr")
        spread, _ = measure_dispersion(x, assignment, 4, measure=measure, token_mask=None)
        if x.requires_grad:
            spread.sum().backward()
    for order in (None, packed):
        use = "lists of sets, " + ("each token's cluster" if order is None else "sorted tokens")
        for dtype in (torch.bfloat16, torch.float32):
            for sizes in ((8, 640, 352), (8, 640, 2048)):
                sets = torch.zeros(sizes, dtype=dtype)
                own = cluster.view(sizes[:2])
                set_cluster_scale(sets, own, clusters, order=order, with_dispersion=False)
                set_dispersion(sets, own, clusters, order=order)
    use = "the row of each token, the last chosen cluster"
    set_rows(cluster, 8, clusters)
    for mask in (None, cluster == 0):
        clusters_up_to_last(cluster[:, None], cluster[:, None], clusters, mask)
    for name, turns in {"turned": torch.zeros(2, 1, 64), "as they are": None}.items():
        use, place = f"decode step, heads {name}", torch.zeros(1, dtype=torch.int64)
        heads, rings = [bf16(2, 4, 1, 128)] * 3, [bf16(2, 4, 64, 128)] * 2
        store_in_ring(*heads, *rings, place, turns, 0.1)
    for normalize in ("cluster", "feature", "global"):
        use = f"scale {normalize}"
        for clamped in ({}, {"clamp": 1.5, "mean_over": "chosen"}):
            for before in (False, True):
                settings = ScaleSettings(normalize=normalize, mean_before_clamp=before, **clamped)
                fused_cluster_scale(bf16(2, 64, 32), assignment, 4, settings)


def router() -> None:
    """The Hopper kernels of a router of many experts and of fewer, with a scale and without."""
    global use
    from acmoe.ops.route.hopper.launch import (
        launch_affinities,
        launch_router,
        launch_token_gradient,
    )
    from acmoe.ops.route.triton.tokens import Tokens

    x, embedding, grad = bf16(256, 256), bf16(512, 256), bf16(2, 256, 512)
    cluster = torch.zeros(256, dtype=torch.int64)
    for name, how in {"plain": (None, None), "scaled": (torch.zeros(4, 256), cluster)}.items():
        use = f"router of many experts, {name}"
        tokens = Tokens.of(x, *how, None, None, None)
        for kept in (None, torch.zeros_like(x))[: 1 + tokens.has_scale]:
            launch_affinities(tokens, embedding, None, None, torch.zeros(256, 512), kept)
        for addend in (x, None):
            launch_token_gradient(tokens, grad, embedding, addend)
        for experts, choices in ((64, 8), (128, 8), (128, 16)):
            use = f"router of {experts} experts and {choices} choices, {name}"
            affinity, ids = torch.zeros(256, experts), torch.zeros(256, choices).long()
            gate, sums = torch.zeros(256, choices), torch.zeros(2, 4, experts)
            launch_router(
                *(tokens, (embedding[:experts], None, None)),
                *((affinity, ids, gate, ids[:, 0].clone(), sums),),
                **{"top_k": choices, "over_selected": True, "temperature": 1.0, "sums": True},
            )


def uneven() -> None:
    """The backward of a router whose number of experts is no multiple of 16."""
    global use
    from acmoe.ops.route.triton.affinity_gradient import affinity_gradient
    from acmoe.ops.route.triton.backward import embedding_gradient, token_gradient
    from acmoe.ops.route.triton.tokens import Tokens

    use, experts = "40 experts", 40
    x, embedding, assignment = bf16(256, 1024), bf16(experts, 1024), torch.zeros(256).long()
    packed = sort_with_tokens_op(assignment[:, None], assignment, experts)[4]
    order = TokenOrder.unpack(packed, experts)
    scale, grad_gate = torch.zeros(experts, 1024), torch.zeros(256, 8)
    affinity, choices = torch.zeros(256, experts), torch.zeros(256, 8).long()
    upstream = grad_gate, None, torch.zeros(experts)
    grad, _ = affinity_gradient(*upstream, choices, grad_gate, affinity, None, True, 1.0, 2)
    for tokens, end in (
        (Tokens.of(x, None, None, None, None, None), None),
        (Tokens.of(x, scale, assignment, None, order.token, order.end), order.end),
    ):
        token_gradient(tokens, grad, embedding, x)
        embedding_gradient(tokens, end, grad, torch.bfloat16, torch.float32)


def few() -> None:
    """The projections of experts with a few hundred rows on Hopper."""
    global use
    use = "few rows"
    plan = Plan(torch.arange(128), torch.tensor([64, 128]), 1)
    hopper_launch.launch_up(bf16(128, 256), bf16(2, 512, 256), plan, 256)
    for gated in (True, False):
        use = f"few rows as columns, {'up' if gated else 'down'}"
        hopper_launch.launch_columns(bf16(128, 256), bf16(2, 512, 256), plan, gated=gated)


def attention(features: int, keeps: bool) -> tuple[Any, ...]:
    """Queries, keys and values, what is kept; two streams of 256 behind a memory of 256."""
    q = bf16(2, 2, 256, fused_width(features))
    kv = bf16(2, 512, 2, 2, stored_width(features)).permute(2, 0, 3, 1, 4)
    weights, bases = saved_sizes(q.shape, 512, 256) if keeps else (0, (0,))
    return q, kv, SavedWeights(bf16(weights), torch.zeros(bases))


def backward() -> None:
    """Compile attention's backward on Hopper, from saved weights."""
    global use
    for features in (16, 44):
        use = f"{features} features"
        q, kv, kept = attention(features, True)
        grad = bf16(2, 256, 2, stored_width(features)).transpose(1, 2)
        numbers = torch.zeros(2, 2, 256), torch.zeros(2, 2, 256), torch.zeros_like(kept.weights)
        layout = saved_layout(q.shape, 512, 256)
        lse, delta, dscores = numbers
        upstream = attention_keys.Upstream(grad, lse, delta)
        results = attention_keys.KeyGradients(dscores, *kv, 1.0, 1.0)
        attention_keys.run_keys(q, kv[1], upstream, kept, results, layout, features)


def forward() -> None:
    """Compile attention's forward on Hopper."""
    global use
    for features in (16, 44):
        for keeps in (False, True):
            use = f"{features} features, {'kept' if keeps else 'not kept'}"
            q, kv, kept = attention(features, keeps)
            mask = torch.ones(2, 512, dtype=torch.bool)
            bits = torch.zeros(2, 2, 256, dtype=torch.int32)
            positions = bf16(q.shape[-1], 256)
            given = Inputs(q, *kv, positions, mask, bits, 0.1, 0.1, features)
            attention_hopper.run_forward(given, kept)


GROUPS: dict[str, Callable[[], None]] = {
    group.__name__: group
    for group in (
        weights,
        experts,
        own,
        odd,
        wide,
        gates,
        text,
        images,
        measures,
        router,
        uneven,
        few,
        backward,
        forward,
    )
}


def every_kernel() -> dict[str, bool]:
    """Return every kernel that the library launches by its name, and whether it is in Gluon."""
    kernels = {}
    for module in pkgutil.walk_packages(acmoe.ops.__path__, "acmoe.ops."):
        here = importlib.import_module(module.name)
        for name, value in vars(here).items():
            own = isinstance(value, JITFunction) and value.__module__ == here.__name__
            if own and name.endswith("_kernel"):
                kernels[_full(value)] = isinstance(value, GluonJITFunction)
    return kernels


if __name__ == "__main__":
    assert not torch.cuda.is_available(), "launches on a CPU's tensors alone are compiled"
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    kernels = every_kernel()
    device_support.interpreting = lambda: True  # a CPU's tensors may go to kernels
    device_support.has_large_shared_memory = lambda: target.arch in (90, 100)
    JITFunction.run = GluonJITFunction.run = compile_launch
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros
    with backend.use_backend("triton"):
        once = "--once" in sys.argv
        for chosen in [name for name in sys.argv[2:] if name != "--once"]:
            GROUPS[chosen]()
    print(json.dumps({"kernels": kernels, "compiled": found}, indent=1))
