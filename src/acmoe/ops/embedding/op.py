"""Embedding lookup whose gradient is deterministic on a GPU.

The gradient of the embedding matrix (V, D) sums the upstream rows (T, D) that share a word. On a
GPU PyTorch adds them with atomics, in arrival order: with equal seeds this one gradient differed in
its last bits between runs, and after some steps all weights did. Here a stable sort orders the rows
by word, and each word's rows are summed in that order.

T rows looked up, V words, D features.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op


class Embedding(nn.Embedding):
    """`nn.Embedding` with a gradient that is deterministic on a GPU; same parameter."""

    def __init__(self, num_words: int, dim: int) -> None:
        super().__init__(num_words, dim)

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


@op
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return weight[ids]: (..., D) for a weight of (V, D).

    >>> embedding(torch.tensor([2, 0]), torch.tensor([[1.0], [2.0], [3.0]]))
    tensor([[3.],
            [1.]])
    """
    return F.embedding(ids, weight)


@embedding.register("triton", unsupported=lambda weight: triton_unsupported(weight, on_cpu=False))
def _embedding_triton(ids: Tensor, weight: Tensor) -> Tensor:
    """Return weight[ids], with a gradient that is summed in a fixed order."""
    found: Tensor = _embedding(ids, weight)
    return found


@torch.library.custom_op("acmoe::embedding", mutates_args=())
def _embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, weight)


@_embedding.register_fake
def _(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@torch.library.custom_op("acmoe::sum_by_word", mutates_args=())
def sum_by_word(rows: Tensor, ids: Tensor, num_words: int) -> Tensor:
    """Return (V, D): for each word the float32 sum of the rows (..., D) with its id."""
    from acmoe.ops.embedding.triton.embedding import sum_sorted_rows

    # int32 keys: a radix sort takes one pass per byte of its keys.
    word_T, order_T = ids.reshape(-1).int().sort(stable=True)
    rows_TD = rows.reshape(-1, rows.shape[-1]).contiguous()
    return sum_sorted_rows(rows_TD, word_T, order_T, num_words)


@sum_by_word.register_fake
def _(rows: Tensor, ids: Tensor, num_words: int) -> Tensor:
    return rows.new_empty(num_words, rows.shape[-1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ids, weight = inputs
    ctx.num_words = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
    return None, sum_by_word(upstream, ctx.saved_tensors[0], ctx.num_words)


def _save_sum(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward_of_sum(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
    return _embedding(ctx.saved_tensors[0], upstream), None, None


_embedding.register_autograd(_backward, setup_context=_save)
sum_by_word.register_autograd(_backward_of_sum, setup_context=_save_sum)
