"""MoE layers of every kind of router, for the tests of layers on their kernels.

B sequences of L tokens of D features; E experts, of which a token gets K.
"""

from dataclasses import replace

import torch

import acmoe
from acmoe.lab.variants import VariantConfig

B, L, D, E, K = 2, 9, 20, 5, 2
NOISY = acmoe.SMoEConfig(gate="all", noise=1.0)
NOISY_NAME = "noisy, full experts, batch, previous"
ROUTERS = {
    "plain": acmoe.SMoEConfig(),
    "plain with bias, gate over all": acmoe.SMoEConfig(bias=True, gate="all"),
    "batch, previous": acmoe.AdaptiveConfig(statistics="batch"),
    "running, previous": acmoe.AdaptiveConfig(statistics="running"),
    "batch, current": acmoe.AdaptiveConfig(statistics="batch", statistics_of="current"),
    "running, current": acmoe.AdaptiveConfig(statistics="running", statistics_of="current"),
    "prefix": acmoe.AdaptiveConfig(statistics="prefix"),
    "sequence": acmoe.AdaptiveConfig(statistics="sequence"),
    # Swin-MoE: noise, the losses that need it, and a capacity.
    "noisy, full experts": NOISY,
    NOISY_NAME: acmoe.AdaptiveConfig(base=NOISY, statistics="batch"),
    # The kernel's affinities, and a choice by others.
    "unit embeddings, selection bias": acmoe.SMoEConfig(
        normalize_embeddings=True, bias_balancing=0.1
    ),
    "noisy, full experts, unit embeddings, selection bias, running, current": acmoe.AdaptiveConfig(
        base=replace(NOISY, normalize_embeddings=True, bias_balancing=0.1),
        statistics="running",
        statistics_of="current",
    ),
    # Arithmetic on the (C, D) scale, between two kernels.
    "own part, root, matched": VariantConfig(statistics="batch", part="own", power=0.5, match=True),
    # Tokens and embeddings of twice the features.
    "distance in M": VariantConfig(statistics="batch", distance=True),
    # Calls that no kernel serves fall to the reference, inside the same layer.
    "two clusters mixed": acmoe.AdaptiveConfig(statistics="batch", mix=2),
    "centred, learned lambda": VariantConfig(
        statistics="batch", statistics_of="current", center=True, strength=0.5, learn_strength=True
    ),
    "gradient through the scale": acmoe.AdaptiveConfig(statistics="batch", detach=False),
}


def built(name, device, *, num_experts=E, top_k=K):
    torch.manual_seed(0)
    noisy = name.startswith("noisy")
    options = {"dim": D, "hidden": 12, "num_experts": num_experts, "top_k": top_k}
    options["capacity_factor"] = 0.75 if noisy else None
    losses = acmoe.LossConfig(balance=0.1, z=0.01, importance_load=0.2 if noisy else 0.0)
    return torch.nn.ModuleList(
        acmoe.MoE(**options, router=ROUTERS[name], losses=losses) for _ in range(2)
    ).to(device)
