"""Launches of the router's Hopper kernels. This module imports Gluon: import it where they run.

T tokens, D features, E experts.
"""

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.device.launcher import cdiv, launch, tma_aligned
from acmoe.ops.device.tma import describe
from acmoe.ops.route.hopper import affinity as affinity_module
from acmoe.ops.route.hopper import token_gradient as token_module
from acmoe.ops.route.triton.tokens import Tokens

TILE, STAGES = (128, 256), 4  # tokens and experts of a tile of the affinities; of the pipeline
BLOCK = 64  # features, or experts, of a stage
TOKEN_TILE, TOKEN_STAGES = 128, 3  # tokens, and features, of a tile of d x


def _desc(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor for blocks of a matrix in swizzled shared memory."""
    return describe(tma_aligned(tensor), block)


def _num_programs(tiles: int) -> int:
    """Return one program a multiprocessor, or two where the kernel is emulated."""
    if not torch.cuda.is_available():
        return min(2, tiles)
    return min(tiles, torch.cuda.get_device_properties().multi_processor_count)


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
    num_e = cdiv(E, TILE[1])
    tiles = cdiv(T, TILE[0]) * num_e
    x = _desc(tokens.x, [TILE[0], BLOCK])
    launch(
        *(affinity_module.affinity_kernel, (_num_programs(tiles),)),
        *(x, _desc(embedding_ED.contiguous(), [TILE[1], BLOCK])),
        x if kept_TD is None else _desc(kept_TD, [TILE[0] // 2, BLOCK]),
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


def launch_token_gradient(
    tokens: Tokens, grad_ZTE: Tensor, embedding_ED: Tensor, addend_TD: Tensor | None
) -> Tensor:
    """Return d x (T, D) of unsorted bf16 tokens, for d affinity as a bf16x2 split (Z = 2)."""
    T, D = tokens.x.shape
    E = embedding_ED.shape[0]
    grad_TD = torch.empty_like(tokens.x)
    out = _desc(grad_TD, [BLOCK, BLOCK])
    num_n = cdiv(D, TOKEN_TILE)
    tiles = cdiv(T, TOKEN_TILE) * num_n
    launch(
        *(token_module.token_gradient_kernel, (_num_programs(tiles),)),
        _desc(grad_ZTE.view(2 * T, E), [TOKEN_TILE, BLOCK]),
        _desc(embedding_ED.contiguous(), [BLOCK, TOKEN_TILE]),
        *(out if addend_TD is None else _desc(addend_TD.contiguous(), [BLOCK, BLOCK]), out),
        *(tokens.scale, tokens.cluster),
        *(T, D, tokens.scale.shape[0], tiles, num_n, cdiv(E, BLOCK)),
        HAS_SCALE=tokens.has_scale,
        HAS_ADDEND=addend_TD is not None,
        STAGES=TOKEN_STAGES,
        num_warps=4,
    )
    return grad_TD
