"""Prompts of any lengths as one batch: check the ids, and pad on the left.

Shapes: B sequences, L prompt length with padding.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.models.text.segment import blank_ids
from acmoe.ops.checks import check_range

Prompt = Tensor | Sequence[Tensor] | Sequence[Sequence[int]]


def batch_prompts(
    prompt: Prompt, prompt_mask: Tensor | None, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return (B, L) prompts padded on the left, and their mask if there is any padding."""
    if isinstance(prompt, Tensor):
        tokens_BL, mask_BL = _padded(prompt, prompt_mask, device)
    else:
        check(prompt_mask is None, "prompt_mask is for a padded tensor; a list needs none")
        check(
            isinstance(prompt, Iterable), f"prompt={prompt!r}; pass ids, one row or list per prompt"
        )
        tokens_BL, mask_BL = _pad(prompt, device)
    check_range(blank_ids(tokens_BL, mask_BL), 0, vocab_size, "prompt")
    return tokens_BL, mask_BL


def _padded(
    prompt: Tensor, prompt_mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Check a prompt tensor and its mask; return both as (B, L)."""
    tokens_BL = prompt if prompt.dim() == 2 else prompt[None]
    check(
        tokens_BL.dim() == 2 and tokens_BL.numel() > 0,
        f"prompt has shape {tuple(prompt.shape)}; pass ids of shape (sequences, length), each with "
        "one token at least",
    )
    tokens_BL = _whole(tokens_BL).to(device)
    if prompt_mask is None:
        return tokens_BL, None
    check(
        isinstance(prompt_mask, Tensor),
        f"prompt_mask is a {type(prompt_mask).__name__}; pass a bool tensor, True for real tokens",
    )
    mask_BL = prompt_mask.to(device)
    check(
        mask_BL.dtype == torch.bool,
        f"prompt_mask has dtype {mask_BL.dtype}; pass a bool tensor, True for real tokens",
    )
    check(
        mask_BL.shape == tokens_BL.shape
        and bool(mask_BL[:, -1].all() and (mask_BL[:, 1:] >= mask_BL[:, :-1]).all()),
        f"prompt_mask of shape {tuple(mask_BL.shape)} must fit the prompt and be True from the "
        "first real token to the last column: pad on the left",
    )
    return tokens_BL, mask_BL


def _pad(
    prompts: Sequence[Tensor] | Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Pad a list of prompts on the left; return tokens and mask (B, L)."""
    rows = [_ids(row, device) for row in prompts]
    check(len(rows) > 0 and min(map(len, rows)) > 0, "a prompt is empty; give each one token")
    length = max(map(len, rows))
    tokens_BL = torch.zeros(len(rows), length, dtype=torch.int64, device=device)
    mask_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens_BL[index, length - len(row) :] = row
        mask_BL[index, length - len(row) :] = True
    return tokens_BL, None if min(map(len, rows)) == length else mask_BL


def _ids(row: Any, device: torch.device) -> Tensor:
    """Return (L,) the int64 ids of one prompt of a list."""
    check(
        not isinstance(row, str) and torch.as_tensor(row).dim() > 0,
        f"prompt holds {row!r}; pass one list of ids per prompt, as in [[72, 101]]",
    )
    ids = torch.as_tensor(row, device=device).flatten()
    return _whole(ids) if len(ids) else ids.long()  # torch makes an empty list a float tensor


def _whole(ids: Tensor) -> Tensor:
    """Return ids as int64; raise a UserError if their dtype is none of whole numbers."""
    check(
        not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool),
        f"prompt has dtype {ids.dtype}; pass token ids, which are whole numbers",
    )
    return ids.long()
