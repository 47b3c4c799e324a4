"""Rows of a table looked up by word, with a gradient that is the same in every run.

A table's gradient is a sum of rows that share a word. Torch's adds them on a GPU as threads happen
to arrive: in training by equal seeds this one gradient differed in its last bits, and after some
steps everything did. Here rows are sorted by word, stably, and each run is summed in its order.

T rows looked up, V words, D features.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.dispatch import Option, choose, requested, triton_obstacle


class Embedding(nn.Embedding):
    """`nn.Embedding`, whose gradient is repeatable on a GPU too; its parameter is the same."""

    def __init__(self, num_words: int, dim: int) -> None:
        super().__init__(num_words, dim)

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids]: (..., D) of a table (V, D).

    >>> embedding(torch.tensor([2, 0]), torch.tensor([[1.0], [2.0], [3.0]]))
    tensor([[3.],
            [1.]])
    """
    options = (Option("triton", embedding_obstacle(weight)), Option("torch", None))
    if choose("embedding", options) == "torch":
        return F.embedding(ids, weight)
    found: Tensor = _embedding(ids, weight)
    return found


def embedding_obstacle(weight: Tensor) -> str | None:
    if not weight.is_cuda and requested() != "triton":
        return "a CPU sums in order anyway"
    return triton_obstacle(weight)


@torch.library.custom_op("acmoe::embedding", mutates_args=())
def _embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, weight)


@_embedding.register_fake
def _(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@torch.library.custom_op("acmoe::sum_by_word", mutates_args=())
def sum_by_word(rows: Tensor, ids: Tensor, num_words: int) -> Tensor:
    """(V, D): of each word the sum of the rows (..., D) whose id it is, added in float32."""
    from acmoe.ops.embedding.triton.embedding import sum_sorted_rows

    # int32: the passes of a radix sort go by the bytes of its keys.
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
