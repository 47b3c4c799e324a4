"""Auxiliary losses as pure functions of a router's affinities and choices.

T tokens, E experts, K experts per token. Where token_mask_T is False, a token is left out of every
mean.
"""

import torch
from torch import Tensor

from acmoe.config.routing import LossConfig
from acmoe.errors import check
from acmoe.ops.route.reference import load
from acmoe.ops.statistics.over_ranks import process_group, sum_over_ranks


def balance_loss(
    affinity_TE: Tensor,
    expert_ids_TK: Tensor,
    token_mask_T: Tensor | None = None,
    *,
    temperature: float = 1.0,
    group: str = "",
) -> Tensor:
    """Return E * sum_e f_e P_e: f the fraction of routed rows, P the mean gate. 1 at balance.

    group: the name of the processes over whose tokens it is taken (`over_group`).
    """
    num_experts = affinity_TE.shape[-1]
    load_E = load(expert_ids_TK, num_experts, token_mask_T).to(affinity_TE.dtype)
    gate_TE = (affinity_TE / temperature).softmax(-1)
    if not group:
        return balance_of(load_E, masked_mean(gate_TE, token_mask_T))
    tokens = load_E.new_full((), gate_TE.shape[0]) if token_mask_T is None else token_mask_T.sum()
    return balance_of(*over_group(load_E, masked_sum(gate_TE, token_mask_T), tokens, group))


def over_group(
    load_E: Tensor, gate_sum_E: Tensor, tokens: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    """Return the load of all processes of the group, and this process's part of the mean gate.

    The mean over processes of the balance loss from these, which is what data parallel training
    minimises, is the balance loss of the whole batch; so is its gradient, since the load has none.
    """
    both = sum_over_ranks(torch.cat([load_E.detach(), tokens.detach().to(load_E)[None]]), group)
    share = both[-1] / process_group(group).size()  # tokens of the group, per process
    return both[:-1], gate_sum_E / share.clamp(min=1e-12)


def balance_of(load_E: Tensor, gate_E: Tensor) -> Tensor:
    """Return the balance loss from each expert's routed rows (E,) and mean gate (E,)."""
    share_E = load_E / load_E.sum().clamp(min=1)
    return load_E.numel() * (share_E * gate_E).sum()


def z_loss(affinity_TE: Tensor, token_mask_T: Tensor | None = None) -> Tensor:
    """Return the mean squared log-sum-exp of the affinities, a penalty on large affinities."""
    return masked_mean(affinity_TE.logsumexp(-1, keepdim=True).square(), token_mask_T).sum()


def importance_loss(affinity_TE: Tensor, token_mask_T: Tensor | None = None) -> Tensor:
    """Return the squared coefficient of variation of the experts' summed gates; 0 at balance."""
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
    """Return the squared coefficient of variation of the expected load; 0 at balance.

    The expectation is over the router's noise. Unlike a count it is differentiable: an expert is
    chosen with the probability that its noisy affinity reaches the token's k-th largest one.
    `tutel` compares softmax probabilities with that threshold of affinities, as Swin-MoE was
    trained; the units of the two do not agree. `kth_T1` is the k-th largest of `noisy_TE`, if the
    caller has it.
    """
    if kth_T1 is None:
        kth_T1 = noisy_TE.topk(top_k, dim=-1).values[:, -1:]
    clean_TE = affinity_TE.softmax(-1) if tutel else affinity_TE
    chance_TE = torch.special.ndtr((clean_TE - kth_T1) / noise_std)
    return squared_variation(masked_sum(chance_TE, token_mask_T))


def stable_balance_loss(
    score_T: Tensor,
    expert_T: Tensor,
    num_experts: int,
    token_mask_T: Tensor | None = None,
    *,
    group: str = "",
) -> Tensor:
    """Return StableMoE's balance loss: the mean over tokens of (n_e - n) / n times their gate.

    n_e is the load of the token's expert e and n the mean load. group: the name of the processes
    over whose tokens it is taken (`over_group`).
    """
    load_E = load(expert_T[:, None], num_experts, token_mask_T).to(score_T.dtype)
    gate_T = score_T.sigmoid()
    if not group:
        surplus_E = load_E / load_E.mean().clamp(min=1e-9) - 1
        return masked_mean((surplus_E[expert_T] * gate_T)[:, None], token_mask_T).sum()
    if token_mask_T is not None:
        gate_T = gate_T.masked_fill(~token_mask_T, 0.0)
    gate_sum_E = torch.zeros_like(load_E).index_add(0, expert_T, gate_T)
    load_E, gate_E = over_group(load_E, gate_sum_E, load_E.sum(), group)
    return ((load_E / load_E.mean().clamp(min=1e-9) - 1) * gate_E).sum()


def distillation_loss(
    light_TE: Tensor, expert_T: Tensor, token_mask_T: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy of the light router (T, E) and the expert it must imitate (T,)."""
    each_T = torch.nn.functional.cross_entropy(light_TE, expert_T, reduction="none")
    return masked_mean(each_T[:, None], token_mask_T).sum()


def squared_variation(value_E: Tensor) -> Tensor:
    """Return variance / mean^2, with the unbiased variance; 0 for a single expert."""
    if value_E.numel() < 2:
        return value_E.sum() * 0.0
    return value_E.var() / (value_E.mean().square() + 1e-10)


def masked_sum(value_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    """Return the sum over unmasked tokens."""
    if token_mask_T is not None:
        value_TX = value_TX.masked_fill(~token_mask_T[:, None], 0.0)
    return value_TX.sum(0)


def masked_mean(value_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    """Return the mean over unmasked tokens; 0 if there are none."""
    if token_mask_T is None:
        return value_TX.sum(0) / max(value_TX.shape[0], 1)
    return masked_sum(value_TX, token_mask_T) / token_mask_T.sum().clamp(min=1)


def common_losses(
    weights: LossConfig,
    affinity_TE: Tensor,
    expert_ids_TK: Tensor,
    mask_T: Tensor | None,
    *,
    temperature: float = 1.0,
    balance: Tensor | None = None,
    group: str = "",
) -> Tensor:
    """Return the weighted sum of balance loss and z-loss.

    balance: the balance loss times its weight, if the caller has it.
    group: the name of the processes over whose tokens the balance loss is taken.
    """
    if not weights.balance and (weights.z or balance is None):
        return weighted_z_loss(weights, affinity_TE, mask_T)
    if balance is None:
        balance = weights.balance * balance_loss(
            affinity_TE, expert_ids_TK, mask_T, temperature=temperature, group=group
        )
    if not weights.z:
        return balance
    return balance + weights.z * z_loss(affinity_TE, mask_T)


def weighted_z_loss(weights: LossConfig, affinity_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return the z-loss alone, for a router that balances by itself; 0 if its weight is 0."""
    if not weights.z:
        return affinity_TE.new_zeros((), dtype=torch.float32)
    return weights.z * z_loss(affinity_TE, mask_T)


def no_noise_losses(losses: LossConfig | None, router: str) -> LossConfig:
    """Return the loss weights of a router without noise; raise if they need an expected load."""
    losses = losses or LossConfig()
    check(
        losses.importance_load == 0,
        f"importance_load={losses.importance_load} needs a noisy top-k router, not "
        f"router={router!r}; use balance instead",
    )
    return losses
