"""Run the experts with the SonicMoE package, an optional backend."""

import torch
from torch import Tensor


def sonic_mlp(
    x_TD: Tensor, up_EWD: Tensor, down_EDF: Tensor, expert_ids_TK: Tensor, gate_TK: Tensor
) -> Tensor:
    """Return (T, D) expert outputs. Every id must be below E: SonicMoE has no "no expert" id."""
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
        concat_layout=True,  # rows of `up`: all of gate, then all of up, as in this library
    )[0]
    return y_TD
