"""Token masks of padded batches, from attention masks and padding ids.

B sequences, L new positions, N positions with those before.
"""

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.hf.models.checks import check_all
from acmoe.ops.checks import check_one_run

IGNORED = -100  # a label that is not scored


def token_mask(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> Tensor | None:
    """Return (B, L), True for real tokens; None if all are.

    attention_mask: (B, N) as transformers gives it, of cached and new positions. The first id after
    the vocabulary, `<pad>` of our tokenizers, is padding with or without an attention mask:
    `generate` fills finished sequences with it and does not mask it.

    Eager code asks the device whether there is padding, for which the host waits once per call:
    without a mask every layer makes a pass less over its tokens.

    Compiled code cannot branch on values. There an attention mask is used even if all tokens are
    real, with the same results; without one, all tokens must be real.
    """
    check(
        input_ids.dim() == 2 and input_ids.numel() > 0,
        f"input_ids have shape {tuple(input_ids.shape)}; pass at least one id, (sequences, length)",
    )
    check(
        not input_ids.is_floating_point(),
        f"input_ids are {input_ids.dtype}; pass whole numbers (input_ids.long())",
    )
    mask_BL = None if attention_mask is None else _newest(attention_mask, input_ids)
    real_BL = input_ids != vocab_size
    if mask_BL is None and torch.compiler.is_compiling():
        check_all(
            real_BL,
            f"input_ids hold the padding id {vocab_size}; compiled code needs an attention_mask "
            "for it",
        )
        return None
    mask_BL = real_BL if mask_BL is None else mask_BL & real_BL
    if torch.compiler.is_compiling() or mask_BL.is_meta:
        return mask_BL
    if bool(mask_BL.all()):
        return None
    # Distances between tokens would count a gap. On the CPU a check raises a UserError; the host
    # has just waited for the device.
    fix = "pad before the first token of a text or after its last"
    check_one_run(mask_BL.cpu(), "attention_mask", fix)
    return mask_BL


def _newest(attention_mask: Tensor, input_ids: Tensor) -> Tensor:
    """Return the part (B, L) of an attention mask (B, N) for the new positions."""
    check(
        attention_mask.dim() == 2,
        f"attention_mask has shape {tuple(attention_mask.shape)}; pass (sequences, length): "
        "masks of pairs of positions are not supported",
    )
    mask_BL = attention_mask[:, -input_ids.shape[1] :].bool()
    check(
        mask_BL.shape == input_ids.shape,
        f"attention_mask has shape {tuple(attention_mask.shape)} and input_ids "
        f"{tuple(input_ids.shape)}; give one entry per position",
    )
    return mask_BL


def last_token(mask_BL: Tensor | None, input_ids: Tensor) -> Tensor:
    """Return (B,), the position of each sequence's last real token."""
    length = input_ids.shape[1]
    if mask_BL is None:
        return input_ids.new_full((len(input_ids),), length - 1)
    return length - 1 - mask_BL.flip(1).int().argmax(1)
