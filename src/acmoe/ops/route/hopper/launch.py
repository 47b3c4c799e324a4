"""Launches of the router's Hopper kernels. This module imports Gluon: import it where they run.

T tokens, D features, E experts.
"""

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.device.gluon_blocks import HALF_M, PANEL
from acmoe.ops.device.launcher import (
    cdiv,
    launch,
    multiprocessors,
    next_power_of_2,
    tma_aligned,
)
from acmoe.ops.device.tma import describe
from acmoe.ops.route.hopper import affinity as affinity_module
from acmoe.ops.route.hopper import router as router_module
from acmoe.ops.route.hopper import token_gradient as token_module
from acmoe.ops.route.triton.tokens import Tokens

# Sizes that the kernels are written for: tokens and experts of a tile of the affinities, and
# features of a stage; tokens and features of a tile of d x, experts of a stage, and one panel.
TOKENS, EXPERTS = affinity_module.TOKENS.value, affinity_module.EXPERTS.value
BLOCK = affinity_module.BLOCK.value
TOKEN_TILE, TOKEN_BLOCK = token_module.TILE.value, token_module.BLOCK.value
TOKEN_PANEL = [HALF_M.value, PANEL.value]
STAGES, TOKEN_STAGES = 4, 3  # of the pipelines: as many as fit into shared memory
ROWS_OF_SUMS = HALF_M.value  # tokens of each partial sum of `launch_router`
ROUTER_STAGES = 4  # 6 and 8 took as long (H200)


def _desc(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor for blocks of a matrix in swizzled shared memory."""
    return describe(tma_aligned(tensor), block)


def launch_affinities(
    tokens: Tokens,
    embedding_ED: Tensor,
    bias_E: Tensor | None,
    noise_TE: Tensor | None,
    affinity_TE: Tensor,
    kept_TD: Tensor | None = None,
) -> None:
    """Write x * scale @ embedding^T + bias + noise (T, E) of unsorted bf16 tokens.

    kept_TD: write x * scale here, rounded to bf16; only for tokens with a scale.
    """
    T, D = tokens.x.shape
    E = embedding_ED.shape[0]
    num_e = cdiv(E, EXPERTS)
    tiles = cdiv(T, TOKENS) * num_e
    x = _desc(tokens.x, [TOKENS, BLOCK])
    launch(
        *(affinity_module.affinity_kernel, (min(tiles, multiprocessors()),)),
        *(x, _desc(embedding_ED.contiguous(), [EXPERTS, BLOCK])),
        x if kept_TD is None else _desc(kept_TD, [HALF_M.value, BLOCK]),
        *(tokens.scale, tokens.cluster),
        embedding_ED if bias_E is None else bias_E,
        affinity_TE if noise_TE is None else noise_TE.contiguous(),
        *(affinity_TE, T, D, E, tokens.scale.shape[0], tiles, num_e),
        HAS_SCALE=tokens.has_scale,
        HAS_BIAS=bias_E is not None,
        HAS_NOISE=noise_TE is not None,
        KEEPERS=0 if kept_TD is None else num_e,
        STAGES=STAGES,
        num_warps=4,
    )


def launch_router(
    tokens: Tokens,
    router: tuple[Tensor, Tensor | None, Tensor | None],
    outputs: tuple[Tensor, ...],
    *,
    top_k: int,
    over_selected: bool,
    temperature: float,
    sums: bool,
) -> None:
    """Route bf16 tokens in their own order among 33 to 128 experts.

    router: embedding (E, D), bias and noise. outputs: affinity (T, E), ids, gate, first choice, and
    partial sums (2, N, E), or with `sums=False` a number () that becomes 0.
    """
    embedding_ED, bias_E, noise_TE = router
    T, D = tokens.x.shape
    E = embedding_ED.shape[0]
    affinity_TE, *others = outputs
    tiles = cdiv(T, TOKENS)
    width = max(HALF_M.value, next_power_of_2(E))
    launch(
        *(router_module.router_kernel, (min(tiles, multiprocessors()),)),
        *(_desc(tokens.x, [TOKENS, BLOCK]), _desc(embedding_ED.contiguous(), [width, BLOCK])),
        *(tokens.scale, tokens.cluster),
        embedding_ED if bias_E is None else bias_E,
        affinity_TE if noise_TE is None else noise_TE.contiguous(),
        *(affinity_TE, *others, T, D, tokens.scale.shape[0], tiles, 1.0 / temperature),
        E=E,
        HAS_SCALE=tokens.has_scale,
        HAS_BIAS=bias_E is not None,
        HAS_NOISE=noise_TE is not None,
        HAS_SUMS=sums,
        K=top_k,
        SELECTED=over_selected,
        STAGES=ROUTER_STAGES,
        num_warps=4,
    )


def launch_token_gradient(
    tokens: Tokens, grad_ZTE: Tensor, embedding_ED: Tensor, addend_TD: Tensor | None
) -> Tensor:
    """Return d x (T, D) of unsorted bf16 tokens, for d affinity as a bf16x2 split (Z = 2)."""
    T, D = tokens.x.shape
    E = embedding_ED.shape[0]
    grad_TD = torch.empty_like(tokens.x)
    out = _desc(grad_TD, TOKEN_PANEL)
    num_n = cdiv(D, TOKEN_TILE)
    tiles = cdiv(T, TOKEN_TILE) * num_n
    launch(
        *(token_module.token_gradient_kernel, (min(tiles, multiprocessors()),)),
        _desc(grad_ZTE.view(2 * T, E), [TOKEN_TILE, TOKEN_BLOCK]),
        _desc(embedding_ED.contiguous(), [TOKEN_BLOCK, TOKEN_TILE]),
        *(out if addend_TD is None else _desc(addend_TD.contiguous(), TOKEN_PANEL), out),
        *(tokens.scale, tokens.cluster),
        *(T, D, tokens.scale.shape[0], tiles, num_n, cdiv(E, TOKEN_BLOCK)),
        HAS_SCALE=tokens.has_scale,
        HAS_ADDEND=addend_TD is not None,
        STAGES=TOKEN_STAGES,
        num_warps=4,
    )
    return grad_TD
