"""The ids and masks of one segment: check them, blank padding, join the mask with the memory's.

Shapes: B batch, L length of the segment, S positions of memory.
"""

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.models.text.memory import StreamMemory
from acmoe.ops.checks import check_one_run, check_range
from acmoe.ops.cross_entropy.op import IGNORED


def check_segment(
    tokens: Tensor,
    targets: Tensor | None,
    memory: StreamMemory | None,
    token_mask: Tensor | None,
    *,
    vocab_size: int,
    num_blocks: int,
) -> None:
    """Raise a UserError unless the arguments of a forward pass fit each other and the model."""
    check(
        isinstance(tokens, Tensor),
        f"tokens are a {type(tokens).__name__}; pass a tensor of ids (streams, length)",
    )
    check(
        tokens.dim() == 2 and tokens.numel() > 0,
        f"tokens have shape {tuple(tokens.shape)}; pass ids of shape (streams, length), each 1 or "
        "more",
    )
    for name, other in (("targets", targets), ("token_mask", token_mask)):
        check(
            other is None or isinstance(other, Tensor),
            f"{name} is a {type(other).__name__}; pass a tensor with one entry per token",
        )
    if token_mask is not None:
        check(
            token_mask.dtype == torch.bool,
            f"token_mask has dtype {token_mask.dtype}; pass a bool tensor, True for real tokens",
        )
    for name, other in (("targets", targets), ("token_mask", token_mask)):
        check(
            other is None or other.shape == tokens.shape,
            f"{name} have shape {other is not None and tuple(other.shape)}; tokens have "
            f"{tuple(tokens.shape)}: give one entry per token",
        )
    check_ids(tokens, "tokens")
    check_range(blank_ids(tokens, token_mask), 0, vocab_size, "tokens")
    if targets is not None:
        check_ids(targets, "targets")
        scored = blank_ids(targets, token_mask).masked_fill(targets == IGNORED, 0)
        also = f", or be {IGNORED} where a prediction is not scored"
        check_range(scored, 0, vocab_size, "targets", also)
    if memory is not None:
        check(
            len(memory.hidden) == num_blocks and memory.hidden[0].shape[0] == tokens.shape[0],
            f"memory has {len(memory.hidden)} blocks and {memory.hidden[0].shape[0]} streams, "
            f"this call {num_blocks} and {tokens.shape[0]}; pass these streams' memory",
        )


def check_padding(
    memory: StreamMemory | None, token_mask: Tensor | None, tokens: Tensor, *, masked: bool
) -> None:
    """Raise a UserError if padding is between two tokens of a stream.

    Distances between tokens, and so the results, would count it. masked: positions of memory that
    hold no token are False in its mask; in the published model they are zeros, and not known.
    """
    joined = joined_mask(memory, token_mask, tokens) if masked else token_mask
    if joined is not None:
        fix = "pad before a stream's first token or after its last, earlier segments included"
        check_one_run(joined, "token_mask", fix)


def check_ids(ids: Tensor, name: str) -> None:
    """Raise a UserError unless the ids are int64 or int32, which embeddings and losses take."""
    check(
        ids.dtype in (torch.int64, torch.int32),
        f"{name} are {ids.dtype}; pass whole numbers as int64 or int32: {name}.long()",
    )


def blank_ids(ids: Tensor, token_mask: Tensor | None) -> Tensor:
    """Replace the ids of padding, which may be invalid, by 0."""
    return ids if token_mask is None else ids.masked_fill(~token_mask, 0)


def joined_mask(
    memory: StreamMemory | None, token_mask_BL: Tensor | None, tokens_BL: Tensor
) -> Tensor | None:
    """Return (B, S + L), True for positions that attention may see; None if all are real tokens."""
    if token_mask_BL is None and (memory is None or memory.mask is None):
        return None
    parts = []
    if memory is not None:
        shape = memory.hidden[0].shape[:2]
        every = torch.ones(shape, dtype=torch.bool, device=tokens_BL.device)
        parts.append(every if memory.mask is None else memory.mask)
    every = torch.ones_like(tokens_BL, dtype=torch.bool)
    parts.append(every if token_mask_BL is None else token_mask_BL)
    return torch.cat(parts, dim=1)
