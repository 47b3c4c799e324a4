"""Register the faster kernels of the op `expert_mlp`.

triton       gather, GEMMs, activation, gate and combine as fused kernels (autograd.py)
native       few rows of small experts, in C (cpu/native.py, cpu/native_gradient.py)
cpu          the definition in fewer calls (cpu/forward.py, cpu/gradient.py, cpu/one_token.py)
grouped_mm   the definition, with torch's grouped GEMM
sonicmoe     the SonicMoE package, if it is installed and requested by name
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from acmoe.ops.device_support import installed, triton_unsupported
from acmoe.ops.experts.autograd import fused_expert_mlp
from acmoe.ops.experts.cpu import forward as cpu
from acmoe.ops.experts.cpu import native
from acmoe.ops.experts.grouped_mm import grouped_mm, grouped_mm_unsupported
from acmoe.ops.experts.padding import pad_experts, worth_padding
from acmoe.ops.experts.reference import ExpertWeights, expert_mlp, expert_mlp_with
from acmoe.ops.experts.sonicmoe import sonic_mlp
from acmoe.ops.experts.tune.first_use import prepare
from acmoe.ops.sort.reference import Rows


def fused_unsupported(x: Tensor, gate: Tensor) -> str | None:
    """Return the reason why the Triton kernels cannot serve this call, or None."""
    return "there are no tokens" if gate.numel() == 0 else triton_unsupported(x)


@expert_mlp.register("triton", unsupported=fused_unsupported, by_triton=True)
def _expert_mlp_triton(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    *,
    activation: str,
    dropout: float = 0.0,
    complete: bool = False,
) -> Tensor:
    dim = x.shape[1]
    if worth_padding(weights, gate.numel()):
        x, weights = pad_experts(x, weights)
    if x.is_cuda and not is_compiling():
        prepare(x, weights, rows, gate, activation)
    up, down, up_bias, down_bias = weights
    up_bias = None if up_bias is None else up_bias.to(x.dtype)
    down_bias = None if down_bias is None else down_bias.to(x.dtype)
    weights = ExpertWeights(up, down, up_bias, down_bias)
    out = fused_expert_mlp(x, weights, rows, gate, activation=activation, dropout=dropout)
    return out if out.shape[1] == dim else out[:, :dim].contiguous()


expert_mlp.register("native", unsupported=native.unsupported)(native.expert_mlp_in_c)
expert_mlp.register("cpu", unsupported=cpu.unsupported)(cpu.expert_mlp_in_few_calls)


def _grouped_unsupported(x: Tensor, weights: ExpertWeights, gate: Tensor) -> str | None:
    """Return the reason why the grouped GEMM of PyTorch cannot serve this call, or None."""
    widths = (weights.up.shape[1], weights.up.shape[2], weights.down.shape[2])
    if gate.numel() == 0:
        return "there are no tokens"
    return grouped_gemm_unsupported(x, *widths)


def grouped_gemm_unsupported(x: Tensor, *widths: int) -> str | None:
    """Return the reason why `grouped_mm` cannot take rows like x of these widths, or None."""
    return grouped_mm_unsupported(x.device, x.dtype, *widths)


@expert_mlp.register("grouped_mm", unsupported=_grouped_unsupported)
def _expert_mlp_grouped(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    *,
    activation: str,
    dropout: float = 0.0,
    complete: bool = False,
) -> Tensor:
    return expert_mlp_with(grouped_mm, x, weights, rows, gate, activation, dropout)


def sonicmoe_unsupported(
    x: Tensor,
    weights: ExpertWeights,
    gate: Tensor,
    activation: str,
    dropout: float,
    complete: bool,
) -> str | None:
    """Return the reason why the SonicMoE package cannot serve this call, or None."""
    if gate.numel() == 0:
        return "there are no tokens"
    if not complete:
        return "it has no rows without an expert"
    return sonicmoe_lacks(x, activation, weights.up_bias is not None, dropout)


def sonicmoe_lacks(x: Tensor, activation: str, bias: bool, dropout: float) -> str | None:
    """Return the reason why SonicMoE cannot run such experts on rows like x, or None."""
    if not installed("sonicmoe"):
        return "sonicmoe is not installed"
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 or fp16 on CUDA, not {x.dtype} on {x.device.type}"
    if activation != "swiglu" or bias or dropout:
        return f"it has swiglu without bias and dropout, not {activation} with them"
    return None


@expert_mlp.register("sonicmoe", unsupported=sonicmoe_unsupported, automatic=False)
def _expert_mlp_sonicmoe(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    *,
    activation: str,
    dropout: float = 0.0,
    complete: bool = False,
) -> Tensor:
    # The package sorts the rows itself, so undo the sort: ids by token and choice.
    expert_ids_TK = rows.expert[rows.inverse].view(gate.shape)
    return sonic_mlp(x, weights.up, weights.down, expert_ids_TK, gate)
