"""Sums of each token's rows on a CPU, in one pass over memory.

torch's embedding bag gathers the rows of a token, multiplies each by its weight and adds them. A
gather, a product and a sum write the rows twice (one core of a Xeon with AVX-512, torch 2.13,
microseconds on a busy machine):

    tokens x choices x features    weighted: three calls    one    not weighted: two calls    one
    1,024 x 2 x 64                                   280    100                        180     97
    512 x 8 x 2,048                               55,000  3,700                     29,000  3,700

T tokens, K experts per token, N = T * K rows, D features.
"""

import torch
from torch import Tensor

from acmoe.ops.dispatch import transforming

_batched = torch._C._functorch.is_legacy_batchedtensor


def in_bags(y_ND: Tensor) -> bool:
    """Return True if the functions of this file serve such rows: on a CPU, outside of compilers.

    torch has no batching rule for an embedding bag, so that batched backwards add rows otherwise.
    """
    if torch.compiler.is_compiling() or transforming() or _batched(y_ND):
        return False
    return y_ND.device.type == "cpu" and y_ND.numel() > 0


def sum_of_choices(y_ND: Tensor, inverse_N: Tensor, gate_TK: Tensor) -> Tensor:
    """Return (T, D): the sum over k of gate[t, k] * y[inverse[t * K + k]], first choice first.

    It records no gradient. A product is not rounded before it is added.
    """
    return _bags(y_ND, inverse_N, gate_TK.shape[1], gate_TK.detach().reshape(-1))


def sum_of_rows(y_ND: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
    """Return (T, D): the sum over k of y[inverse[t * K + k]]. It records no gradient."""
    return _bags(y_ND, inverse_N, top_k, None)


def _bags(y_ND: Tensor, inverse_N: Tensor, top_k: int, weight_N: Tensor | None) -> Tensor:
    # Rows without a gradient: otherwise torch also returns what its own backward would read.
    begin_T = torch.arange(0, inverse_N.numel(), top_k, device=inverse_N.device)
    found: tuple[Tensor, ...] = torch.embedding_bag(
        y_ND.detach(), inverse_N, begin_T, per_sample_weights=weight_N
    )
    return found[0]
