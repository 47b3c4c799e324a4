"""Auxiliary losses as pure functions of a router's numbers.

T tokens, E experts, K experts per token. A False in token_mask_T takes a token out of every mean.
"""

import torch
from torch import Tensor


def load(expert_ids_TK: Tensor, num_experts: int, token_mask_T: Tensor | None = None) -> Tensor:
    """(E,) float32 routed rows per expert; the id E ("no expert") is not counted.

    Sums of ones are exact in float32 up to 2^24 rows, so the order of additions cannot matter.
    """
    ones_TK = torch.ones_like(expert_ids_TK, dtype=torch.float32)
    if token_mask_T is not None:
        ones_TK = ones_TK * token_mask_T[:, None]
    total = torch.zeros(num_experts + 1, device=expert_ids_TK.device)
    return total.index_add(0, expert_ids_TK.flatten(), ones_TK.flatten())[:num_experts]


def balance_loss(
    affinity_TE: Tensor,
    expert_ids_TK: Tensor,
    token_mask_T: Tensor | None = None,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """E * sum_e f_e P_e: f the share of routed rows, P the mean gate. 1 at perfect balance."""
    num_experts = affinity_TE.shape[-1]
    load_E = load(expert_ids_TK, num_experts, token_mask_T).to(affinity_TE.dtype)
    gate_E = masked_mean((affinity_TE / temperature).softmax(-1), token_mask_T)
    return balance_of(load_E, gate_E)


def balance_of(load_E: Tensor, gate_E: Tensor) -> Tensor:
    """The balance loss, of each expert's routed rows and mean gate."""
    share_E = load_E / load_E.sum().clamp(min=1)
    return load_E.numel() * (share_E * gate_E).sum()


def z_loss(affinity_TE: Tensor, token_mask_T: Tensor | None = None) -> Tensor:
    """Mean squared log-partition: keeps affinities small enough for low precision."""
    return masked_mean(affinity_TE.logsumexp(-1, keepdim=True).square(), token_mask_T).sum()


def importance_loss(affinity_TE: Tensor, token_mask_T: Tensor | None = None) -> Tensor:
    """Squared coefficient of variation of each expert's summed gate; 0 at balance."""
    return squared_variation(masked_sum(affinity_TE.softmax(-1), token_mask_T))


def load_loss(
    affinity_TE: Tensor,
    noisy_TE: Tensor,
    top_k: int,
    noise_std: float,
    token_mask_T: Tensor | None = None,
    *,
    tutel: bool = False,
    kth_T1: Tensor | None = None,
) -> Tensor:
    """Squared variation of the load expected under the router's noise: smooth, as a count is not.

    An expert is chosen when its noisy affinity reaches the token's k-th largest one. `tutel`
    compares probabilities with that threshold of affinities, as Swin-MoE was trained; the units of
    the two do not agree. `kth_T1` is that k-th largest one of `noisy_TE`, if it has been found.
    """
    if kth_T1 is None:
        kth_T1 = noisy_TE.topk(top_k, dim=-1).values[:, -1:]
    clean_TE = affinity_TE.softmax(-1) if tutel else affinity_TE
    chance_TE = torch.special.ndtr((clean_TE - kth_T1) / noise_std)
    return squared_variation(masked_sum(chance_TE, token_mask_T))


def stable_balance_loss(
    score_T: Tensor, expert_T: Tensor, num_experts: int, token_mask_T: Tensor | None = None
) -> Tensor:
    """StableMoE's: each expert's surplus load (n_e - n) / n times its summed gate, per token."""
    load_E = load(expert_T[:, None], num_experts, token_mask_T).to(score_T.dtype)
    surplus_E = load_E / load_E.mean().clamp(min=1e-9) - 1
    return masked_mean((surplus_E[expert_T] * score_T.sigmoid())[:, None], token_mask_T).sum()


def distillation_loss(
    light_TE: Tensor, expert_T: Tensor, token_mask_T: Tensor | None = None
) -> Tensor:
    """Cross-entropy of the light router against the choice it must imitate."""
    each_T = torch.nn.functional.cross_entropy(light_TE, expert_T, reduction="none")
    return masked_mean(each_T[:, None], token_mask_T).sum()


def squared_variation(value_E: Tensor) -> Tensor:
    """Var / mean^2 with the unbiased variance; 0 for a single expert."""
    if value_E.numel() < 2:
        return value_E.sum() * 0.0
    return value_E.var() / (value_E.mean().square() + 1e-10)


def masked_sum(value_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    if token_mask_T is not None:
        value_TX = value_TX.masked_fill(~token_mask_T[:, None], 0.0)
    return value_TX.sum(0)


def masked_mean(value_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    """Mean over the tokens that count; 0 when there are none."""
    if token_mask_T is None:
        return value_TX.sum(0) / max(value_TX.shape[0], 1)
    return masked_sum(value_TX, token_mask_T) / token_mask_T.sum().clamp(min=1)
