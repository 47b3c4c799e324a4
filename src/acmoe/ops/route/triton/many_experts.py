"""The affinities of more than MANY_EXPERTS, in tiles of tokens and experts (see route.py).

T tokens, D features, E experts.
"""

import torch
from torch import Tensor

from acmoe.ops import device_support
from acmoe.ops.device.launcher import cdiv, launch
from acmoe.ops.route.hopper.choice import hopper_unsupported
from acmoe.ops.route.triton.affinity import affinity_kernel
from acmoe.ops.route.triton.rescale import rescaled, worth_rescaling
from acmoe.ops.route.triton.tokens import Tokens

# Tokens, experts, warps and stages of a tile. One stage less where the scale of each token is
# loaded as well, for the 99 KiB of smaller cards; on others it would cost 371 us instead of 272
# (qwen3next, H200).
AFFINITY_TILE = (64, 128, 4, 3)


def many_affinities(
    tokens: Tokens,
    embedding_ED: Tensor,
    bias_E: Tensor | None,
    noise_TE: Tensor | None,
    affinity_TE: Tensor,
    terms: int,
    features: int,
    keeps: bool,
) -> Tensor | None:
    """Write the affinities of all tokens and experts.

    terms: TERMS of `accurate_dot`. features: the number of features of one step. keeps: return
    x * scale (T, D), rounded to bf16 as by `rescaled`, if the kernel computes it; otherwise None.
    """
    if hopper_unsupported(tokens, embedding_ED) is None:
        from acmoe.ops.route.hopper.launch import launch_affinities

        kept_TD = torch.empty_like(tokens.x) if keeps and tokens.has_scale else None
        launch_affinities(tokens, embedding_ED, bias_E, noise_TE, affinity_TE, kept_TD)
        return kept_TD
    T, D = tokens.x.shape
    E = embedding_ED.shape[0]
    height, width, num_warps, num_stages = AFFINITY_TILE
    reading = rescaled(tokens, 2) if worth_rescaling(tokens, E) else tokens
    if reading.has_scale and not reading.is_sorted and not device_support.has_large_shared_memory():
        num_stages -= 1
    launch(
        affinity_kernel, (cdiv(E, width), reading.blocks(height)),
        *reading.pointers, embedding_ED.contiguous(), embedding_ED if bias_E is None else bias_E,
        affinity_TE if noise_TE is None else noise_TE.contiguous(), affinity_TE, T, D,
        reading.scale.shape[0], E=E, HAS_BIAS=bias_E is not None, HAS_NOISE=noise_TE is not None,
        TERMS=terms, **reading.flags, SPLIT=reading.is_split, RANGE=0, BT=height, BD=features,
        BE=width, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return None
