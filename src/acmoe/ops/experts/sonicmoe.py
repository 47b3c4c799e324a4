"""The experts by the SonicMoE package, where it is installed: a backend to choose or to measure."""

import torch
from torch import Tensor


def sonic_mlp(
    x_TD: Tensor, up_EWD: Tensor, down_EDF: Tensor, expert_ids_TK: Tensor, gate_TK: Tensor
) -> Tensor:
    """(T, D): every row needs an expert; the id E is not known there."""
    from sonicmoe import moe_general_routing_inputs  # type: ignore[import-not-found]
    from sonicmoe.enums import ActivationType  # type: ignore[import-not-found]

    T, K = expert_ids_TK.shape
    token_N = torch.arange(T, device=x_TD.device, dtype=torch.int32).repeat_interleave(K)
    y_TD: Tensor = moe_general_routing_inputs(
        x_TD,
        gate_TK.reshape(-1),
        token_N,
        expert_ids_TK.reshape(-1).to(torch.int32),
        up_EWD.to(x_TD.dtype).permute(1, 2, 0),
        None,
        down_EDF.to(x_TD.dtype).permute(1, 2, 0),
        None,
        up_EWD.shape[0],
        torch.cuda.current_stream().cuda_stream,
        ActivationType.SWIGLU,
        is_inference_mode_enabled=not torch.is_grad_enabled(),
        concat_layout=True,  # gate and up one after the other, as ours
    )[0]
    return y_TD
