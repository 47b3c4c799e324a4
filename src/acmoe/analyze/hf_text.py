"""Read a text for a model of transformers, and cut it into the batches of its forward passes.

B sequences of L tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from acmoe.config.routing import Statistics
from acmoe.errors import UserError, check

if TYPE_CHECKING:
    from acmoe.hf.checkpoints.load import TokenText

BLOCK = 512  # the most tokens per row


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """Options of an analysis of a model of transformers."""

    text: Path  # UTF-8
    tokens: int = 4096  # the most that are read, from the start of the text
    batch: int = 8  # rows per forward pass
    layers: tuple[int, ...] | None = None  # MoE layers, from 1, whose inputs are kept; None: all
    statistics: Statistics | None = None  # mode of attached routers; None: the model's own
    raw_bytes: bool = False  # the token ids are the bytes of the text
    seed: int = 0  # draws the tokens whose router input is kept
    device: str = "auto"

    def __post_init__(self) -> None:
        check(self.tokens >= 2, f"tokens={self.tokens}; give at least 2")
        check(self.batch >= 1, f"batch={self.batch}; it must be at least 1")


class Batch(NamedTuple):
    """The arguments of one forward pass, and which of its tokens count."""

    inputs: dict[str, Tensor]
    counted: Tensor  # (B, L) bool


def read_text(config: HuggingFaceConfig, tokenizer: Any) -> TokenText:
    """Tokenise as much of the file as gives `config.tokens` tokens."""
    from acmoe.hf.checkpoints.load import tokenize, tokenize_bytes

    check(config.text.is_file(), f"{config.text} is no file; give a text with --text FILE")
    characters = 16 * config.tokens
    errors = "surrogateescape" if tokenizer is None else "replace"
    while True:
        try:
            with config.text.open(encoding="utf-8", errors=errors, newline="") as file:
                text = file.read(characters)
        except OSError as error:
            raise UserError(
                f"cannot read {config.text}: {error.strerror}; give a readable text with --text"
            ) from error
        found = tokenize_bytes(text) if tokenizer is None else tokenize(tokenizer, text)
        if len(found.ids) > config.tokens or len(text) < characters:
            break
        characters *= 4
    check(len(found.ids) >= 2, f"{config.text} holds {len(found.ids)} tokens; give a longer text")
    most = config.tokens
    return found._replace(ids=found.ids[:most], pieces=found.pieces[:most])


def cut_rows(found: TokenText, block: int, batch: int) -> Iterable[Batch]:
    """Cut a text into rows of `block` tokens; the last one is shorter, in a pass of its own."""
    start = [] if found.start is None else [found.start]
    rows = [found.ids[at : at + block] for at in range(0, len(found.ids), block)]
    full = rows if len(rows[-1]) == block else rows[:-1]
    groups = [full[at : at + batch] for at in range(0, len(full), batch)]
    for group in [*groups, *([rows[-1:]] if len(full) < len(rows) else [])]:
        tokens_BL = torch.tensor([start + row for row in group])
        counted_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        counted_BL[:, : len(start)] = False
        yield Batch({"input_ids": tokens_BL}, counted_BL)


def as_batch(given: Tensor | Mapping[str, Tensor] | Batch) -> Batch:
    if isinstance(given, Batch):
        return given
    inputs = {"input_ids": given} if isinstance(given, Tensor) else dict(given)
    check("input_ids" in inputs, f"a batch has {', '.join(inputs)}; give input_ids (B, L)")
    tokens_BL = inputs["input_ids"]
    mask_BL = inputs.get("attention_mask", torch.ones_like(tokens_BL))
    check(
        mask_BL.shape == tokens_BL.shape,
        f"attention_mask is {tuple(mask_BL.shape)}; give one of the tokens' shape "
        f"{tuple(tokens_BL.shape)}",
    )
    return Batch(inputs, mask_BL.cpu().bool())


def most_positions(config: Any) -> int:
    """Return the longest sequence that the model has positions for."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 1 else BLOCK
