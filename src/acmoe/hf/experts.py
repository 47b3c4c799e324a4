"""The library's expert kernels as an experts implementation of transformers, named "acmoe".

    import acmoe.hf
    model.set_experts_implementation("acmoe")

serves every model whose experts transformers dispatches (`use_experts_implementation`). Four forms
compute the same sum of expert outputs:

    fused      `expert_mlp`, where its kernels know the activation: SwiGLU, or ReLU and GELU without
               a gate
    few rows   transformers' own `batched_mm`, which copies the weights of the chosen experts: up to
               16 rows (tokens times experts per token) on a GPU, for other activations, under
               autocast, and in compiled code
    clamped    grouped GEMMs with the fused kernel of GPT-OSS's gate between them
    by parts   grouped GEMMs with the model's own activation, gate and norm between them

`experts_reason(experts)` says why a model's experts do not run fused; the log says so once.

T tokens, K experts per token, D features, F hidden units, W = F (or 2F with a gate), E experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

from acmoe.errors import check
from acmoe.models.unmodified import modified
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import log_once, requested
from acmoe.ops.experts import ExpertWeights, clamped_swiglu, expert_mlp, expert_mlp_by_parts
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.precision import autocast_dtype
from acmoe.ops.sort import sort_rows

NAME = "acmoe"
# Rows up to which `batched_mm` serves: its copies grow with the rows. The bound has not been timed.
FEW_ROWS = 16

# Activation modules that the fused kernels know, by class name: with a gate, and without one.
_GATED = {"SiLUActivation": "swiglu", "SiLU": "swiglu"}
_UNGATED = {"ReLU": "relu", "GELUActivation": "gelu"}
_HOMES = ("torch.nn.modules.activation", "transformers.activations")  # modules of these classes
# Experts whose gate is `clamped_swiglu`: True where gate and up alternate in memory.
_CLAMPED = {"GptOssExperts": True, "OpenAIPrivacyFilterExperts": False}
# Names under which configs keep the number of experts of a layer.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return (T, D): the sum of each token's expert outputs, weighted by top_k_weights (T, K).

    hidden_states is (T, D). An id of E in top_k_index (T, K), which expert parallelism gives to the
    experts of other devices, contributes nothing. GEMMs run in the dtype of autocast, or in that
    of the weights.
    """
    experts: Any = self
    activation, reason = fused_activation(experts)
    if _serves_few_rows(experts, hidden_states, top_k_index, fused=activation is not None):
        found: Tensor = batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return found
    weights = expert_weights(experts)
    num_experts = weights.up.shape[0]
    dtype = autocast_dtype(hidden_states) or weights.up.dtype
    expert_ids_TK = top_k_index.long()
    complete = _all_local(experts, num_experts)
    gate_TK = top_k_weights
    if not complete:
        gate_TK = gate_TK.masked_fill(expert_ids_TK >= num_experts, 0.0)
    x_TD = hidden_states.to(dtype)
    rows = sort_rows(expert_ids_TK, num_experts)
    if activation is not None:
        fused: dict[str, Any] = {"activation": activation, "complete": complete}
        out_TD = expert_mlp(x_TD, weights, rows, gate_TK, **fused)
    else:
        if not torch.compiler.is_compiling():
            log_once(f"{type(experts).__name__} runs on grouped GEMMs: {reason}")
        own: dict[str, Any] = {"activation": own_activation(experts), "norm": _norm(experts)}
        out_TD = expert_mlp_by_parts(x_TD, weights, rows, gate_TK, **own, complete=complete)
    return out_TD.to(hidden_states.dtype)


def _serves_few_rows(experts: Any, x_TD: Tensor, expert_ids_TK: Tensor, *, fused: bool) -> bool:
    """Return True if `batched_mm` of transformers should serve: for decoding on a GPU.

    fused: the fused kernels know the activation. They repeat recorded launches, which takes the
    host less time than calls of torch, and copy no weights. Inductor fuses the copies into the
    GEMMs. Under autocast the fused kernels would cast the weights of all experts. In training the
    gradient of the copies would be scattered with atomics.
    """
    if not (_on_gpu(x_TD) and 0 < expert_ids_TK.numel() <= FEW_ROWS and requested() == "auto"):
        return False
    down = experts.down_proj
    casts = autocast_dtype(x_TD) is not None
    if not casts and x_TD.dtype != down.dtype:
        return False
    if fused and not casts and not torch.compiler.is_compiling() and not triton_unsupported(x_TD):
        return False
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return not records_gradient(up, down)


def _on_gpu(x_TD: Tensor) -> bool:
    return x_TD.device.type == "cuda"


def experts_reason(experts: nn.Module) -> str | None:
    """Return the reason why the fused kernels do not compute these experts; None: they do.

    experts: an experts module of a transformers model, such as `model.model.layers[0].mlp.experts`.
    """
    check(
        hasattr(experts, "down_proj") and hasattr(experts, "has_gate"),
        f"{type(experts).__name__} is no experts module to which transformers passes an "
        "implementation; pass one, such as model.model.layers[0].mlp.experts of Mixtral",
    )
    _, reason = fused_activation(experts)
    return reason or triton_unsupported(expert_weights(experts).down)


def fused_activation(experts: Any) -> tuple[str | None, str | None]:
    """Return the activation's name for `expert_mlp`, or None and the reason why it has none."""
    if _flag(experts, "has_post_expert_norm"):
        return None, "a norm follows the experts, before the gate weights"
    if experts.has_gate and _clamped(experts):
        return None, "its clamped gate has a kernel of its own, which is not fused with the GEMMs"
    act: Any = type(getattr(experts, "act_fn", None))
    gate = getattr(experts._apply_gate, "__name__", None) if experts.has_gate else None
    if experts.has_gate and gate != "_default_apply_gate":
        return None, f"no kernel knows the gate of {type(experts).__name__}"
    known = _GATED if experts.has_gate else _UNGATED
    if act.__name__ not in known or act.__module__ not in _HOMES:
        gated = "with" if experts.has_gate else "without"
        return None, f"no kernel knows the activation {act.__name__} {gated} a gate"
    change = modified(experts.act_fn, act)
    if change is not None:
        return None, f"its {act.__name__} {change}"
    if experts.is_transposed:
        return (
            None,
            "its weights are (E, in, out), and the fused kernels read (E, out, in)",
        )
    return known[act.__name__], None


def expert_weights(experts: Any) -> ExpertWeights:
    """Return the weights as (E, W, D) and (E, D, F): views where they are stored transposed."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    up, down = getattr(experts, name), experts.down_proj
    check(
        up.is_floating_point() and up.element_size() >= 2,
        f"{type(experts).__name__} holds {up.dtype} weights; experts implementation {NAME!r} takes "
        "float16, bfloat16 or float32: choose another, or dequantise",
    )
    if experts.is_transposed:
        up, down = up.mT, down.mT
    if not experts.has_bias:
        return ExpertWeights(up, down, None, None)
    return ExpertWeights(up, down, getattr(experts, f"{name}_bias"), experts.down_proj_bias)


def _norm(experts: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the norm of the expert outputs (N, D), if there is one."""
    return experts.post_expert_norm if _flag(experts, "has_post_expert_norm") else None


def own_activation(experts: Any) -> Callable[[Tensor], Tensor]:
    """Return the function between the two GEMMs, (N, W) to (N, F)."""
    if not experts.has_gate:
        own: Callable[[Tensor], Tensor] = experts.act_fn
        return own
    if not _clamped(experts):
        own = experts._apply_gate
        return own
    interleaved = _CLAMPED[type(experts).__name__]
    alpha, limit = float(experts.alpha), float(experts.limit)
    return lambda h: clamped_swiglu(h, alpha=alpha, limit=limit, interleaved=interleaved)


def _clamped(experts: Any) -> bool:
    return type(experts).__name__ in _CLAMPED and hasattr(experts, "alpha")


def _flag(experts: Any, name: str) -> bool:
    """Return an attribute that older versions of transformers do not set."""
    return bool(getattr(experts, name, False))


def _all_local(experts: Any, num_experts: int) -> bool:
    """Return True if no id of E can occur: the experts are not spread over devices.

    Without transformers' own flag, a module with as many experts as its config has is not.
    """
    parallel = getattr(experts, "_is_expert_parallel", None)
    if parallel is not None:
        return not parallel
    return any(getattr(experts.config, name, None) == num_experts for name in _EXPERT_COUNTS)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
