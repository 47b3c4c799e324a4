"""What runs on this machine, and what keeps the faster from it. The ops themselves are asked.

T tokens, D features, K experts per token, V words.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from acmoe.config.images.presets import SWIN_MODELS
from acmoe.config.images.vision import SwinConfig
from acmoe.config.routing import AdaptiveConfig
from acmoe.config.text.language import LANGUAGE_MODELS
from acmoe.experts.mlp import ExpertMLP
from acmoe.lab.bench.rivals import CONTESTANTS
from acmoe.lab.bench.shapes import Shape
from acmoe.lab.bench.train import PAPER_TOKENS
from acmoe.ops.attention.support import (
    fused_width,
    hopper_obstacle,
    keeping_obstacle,
    stored_width,
    window_attention_obstacle,
    wishes,
)
from acmoe.ops.device.tuning import own_table
from acmoe.ops.dispatch import (
    Option,
    choose,
    grouped_mm_obstacle,
    sonicmoe_obstacle,
    triton_obstacle,
)
from acmoe.ops.embedding.op import embedding, embedding_obstacle
from acmoe.ops.map_attention.op import map_attention_fuses, map_attention_obstacle
from acmoe.ops.norm.op import norm_obstacle
from acmoe.routing.statistics import ClusterStatistics


class Choice(NamedTuple):
    """One backend of one op."""

    op: str
    backend: str
    runs: bool  # this is the one
    obstacle: str | None  # None: it could


def which(device: torch.device, dtype: torch.dtype, shape: Shape) -> list[Choice]:
    """Of the larger ops that have a choice, for tokens of `dtype`; experts as those of `shape`.

    Windows of a text and norms are those of switch-enwik8, windows of a map those of swin-small.
    What the environment asks for is checked, though another machine may be meant.
    """
    wishes()
    own_table()
    x_TD = torch.empty(1, shape.dim, dtype=dtype, device=device)
    triton = Option("triton", triton_obstacle(x_TD))
    torch_ = Option("torch", None)
    widths = (shape.width, shape.dim, shape.hidden)
    grouped = Option("grouped_mm", grouped_mm_obstacle(x_TD, *widths))
    sonic = Option("sonicmoe", sonicmoe_obstacle(x_TD, shape.activation, shape.bias, 0.0))
    experts = _experts(x_TD, shape)
    return [
        *_choices("experts", experts, (triton, grouped, torch_, sonic)),
        *(_products(x_TD, shape) if experts == "triton" else ()),
        *_choices("statistics", _statistics(device, dtype), (triton, torch_)),
        *_embedding(x_TD),
        *_norms(device, dtype),
        *_window_attention(device, dtype),
        *_map_attention(device, dtype),
    ]


def rivals(device: torch.device, dtype: torch.dtype, shape: Shape) -> list[Choice]:
    """Whether each rival of `acmoe bench layer` can take part."""
    x_TD = torch.empty(1, shape.dim, dtype=dtype, device=device)
    obstacles = {rival.name: rival.available(shape, x_TD) for rival in CONTESTANTS}
    return [Choice("rival", name, why is None, why) for name, why in obstacles.items()]


def _choices(op: str, runs: str, options: tuple[Option, ...]) -> list[Choice]:
    return [Choice(op, option.name, option.name == runs, option.obstacle) for option in options]


def _experts(x_TD: Tensor, shape: Shape) -> str:
    with torch.device("meta"):  # no weights: their sizes decide
        experts = ExpertMLP(
            dim=shape.dim,
            hidden=shape.hidden,
            num_experts=shape.num_experts,
            activation=shape.activation,
            bias=shape.bias,
        )
    expert_ids_TK = torch.zeros(len(x_TD), shape.top_k, dtype=torch.int64, device=x_TD.device)
    return experts.backend(x_TD, expert_ids_TK, complete=True)


def _products(x_TD: Tensor, shape: Shape) -> list[Choice]:
    """Those that Gluon's kernels may do."""
    from acmoe.ops.device.tuning import BY_ROWS, BY_WEIGHTS
    from acmoe.ops.experts.hopper.choice import gathers, ring_obstacle
    from acmoe.ops.experts.triton.sizes import Sizes

    sizes = (shape.dim, shape.hidden, shape.num_experts)
    size = Sizes(shape.tokens, *sizes, shape.top_k, shape.activation)
    found = []
    for kernel in (*BY_ROWS, *BY_WEIGHTS):
        where = (kernel, size, x_TD.dtype, x_TD.device)
        gather = kernel not in ("down", "input") and gathers(*where)
        bare = kernel not in ("hidden", "down") or not shape.bias
        obstacle = ring_obstacle(*where, gather=gather, bare=bare)
        found += _between(f"experts: {kernel}", obstacle)
    return found


def _between(part: str, obstacle: str | None) -> list[Choice]:
    """Gluon's kernel and that which Triton compiles for every card."""
    options = Option("gluon", obstacle), Option("triton", None)
    return _choices(part, "triton" if obstacle else "gluon", options)


def _statistics(device: torch.device, dtype: torch.dtype) -> str:
    """By taking those of a handful of tokens."""
    tokens, dim, clusters = 32, 32, 2
    with torch.device(device):
        statistics = ClusterStatistics(AdaptiveConfig(), num_clusters=clusters, dim=dim)
        x_BLD = torch.ones(1, tokens, dim, dtype=dtype)
        assignment_BL = torch.arange(tokens)[None] % clusters
    return _owner(lambda: statistics.cluster_scale(x_BLD, assignment_BL, None, None))


def _embedding(weight_VD: Tensor) -> list[Choice]:
    """By looking a word up."""
    ids = torch.zeros(1, dtype=torch.int64, device=weight_VD.device)
    options = Option("triton", embedding_obstacle(weight_VD)), Option("torch", None)
    return _choices("embedding", _owner(lambda: embedding(ids, weight_VD)), options)


def _norms(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """Of the sums in a post-norm block."""
    dim = LANGUAGE_MODELS["switch-enwik8"].config.dim
    x_TD = torch.empty(1, dim, dtype=dtype, device=device)
    obstacle = norm_obstacle(x_TD, x_TD, (nn.LayerNorm(dim, device=device),))
    options = Option("triton", obstacle), Option("torch", None)
    return _choices("norms", choose("norms", options), options)


def _window_attention(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """And whose forward and backward it is, of the two; of a whole batch, for it may keep weights
    only if they fit."""
    config = LANGUAGE_MODELS["switch-enwik8"].config
    features = config.dim // config.heads
    number = torch.empty(1, dtype=dtype, device=device)
    streams = PAPER_TOKENS // config.block
    lead = (streams, config.heads)
    q = number.expand(*lead, config.block, fused_width(features))
    kv = number.expand(2, *lead, config.span + config.block, stored_width(features))
    obstacle = window_attention_obstacle(q, number, config.dropout)
    options = Option("triton", obstacle), Option("torch", None)
    runs = choose("attention", options)
    found = _choices("attention", runs, options)
    if runs == "triton":
        window = (q, kv, config.span, config.dropout)
        found += _between("attention: forward", hopper_obstacle(*window))
        found += _between("attention: backward", keeping_obstacle(*window))
    return found


def _map_attention(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    config = SWIN_MODELS["swin-small"].config
    assert isinstance(config, SwinConfig)
    tokens, features = config.window**2, config.dim // config.heads[0]
    fuses = map_attention_fuses(device, dtype, tokens=tokens, features=features)
    obstacle = map_attention_obstacle(device, dtype, tokens, features)
    options = Option("triton", obstacle), Option("torch", None)
    return _choices("map attention", "triton" if fuses else "torch", options)


def _owner(call: Callable[[], object]) -> str:
    """triton where an op of our own is among the calls, else torch."""
    with _Calls() as calls:
        call()
    return "triton" if "acmoe" in calls.namespaces else "torch"


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects who owns each op that is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.namespaces: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.namespaces.add(func.namespace)
        return func(*args, **(kwargs or {}))
