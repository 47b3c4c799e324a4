"""A language model as a sentence classifier, and two ways to prepare its sentences.

The form "clean" keeps the pretrained vocabulary and masks padding. The form "paper" repeats the
published code: a new vocabulary with a fresh embedding, sentences padded on the left.

B sentences, L positions of the longest, D features.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from acmoe.config.routing import StableConfig, base_router
from acmoe.config.text.finetune import FinetuneConfig, Form
from acmoe.data.text.sentence_batches import EncodedSentence, SentenceBatch
from acmoe.data.text.sentences import Sentence
from acmoe.data.text.vocabulary import EOS, UNK, WordVocabulary
from acmoe.errors import check
from acmoe.models.registry import build_model
from acmoe.models.text.decoder import LanguageModel


class Classifier(nn.Module):
    """A classification head on the hidden state of one token of each sentence."""

    def __init__(self, backbone: LanguageModel, num_classes: int, config: FinetuneConfig) -> None:
        super().__init__()
        self.backbone = backbone
        dim = backbone.config.dim
        self.masked = config.form == "clean"
        self.head = classification_head(dim, num_classes, config.form, config.dropout)

    def forward(self, batch: SentenceBatch) -> Tensor:
        """Return (B, classes) logits."""
        mask = batch.token_mask if self.masked else None
        x_BLD, _, _ = self.backbone.hidden_states(batch.tokens, token_mask=mask)
        row_B = torch.arange(len(batch.last), device=batch.last.device)
        logits: Tensor = self.head(x_BLD[row_B, batch.last])
        return logits


def classification_head(dim: int, num_classes: int, form: Form, dropout: float) -> nn.Module:
    """Return the head of a form of finetuning: one linear layer, or the published three."""
    if form == "clean":
        return nn.Linear(dim, num_classes)
    return nn.Sequential(
        nn.Linear(dim, dim),
        nn.LogSoftmax(-1),
        nn.Linear(dim, dim),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(dim, num_classes),
    )


def pretrained_backbone(model: LanguageModel, config: FinetuneConfig) -> LanguageModel:
    """Copy the pretrained model, with its own embedding, at the dropout of finetuning."""
    changed = replace(model.config, dropout=config.dropout)
    backbone = cast(LanguageModel, build_model(changed))
    backbone.load_state_dict(model.state_dict())
    return backbone


def published_backbone(
    model: LanguageModel, vocabulary: WordVocabulary, config: FinetuneConfig
) -> LanguageModel:
    """Copy the pretrained blocks and positions; the embedding of the new vocabulary is random."""
    check(
        not isinstance(base_router(model.config.router), StableConfig),
        "form='paper' rebuilds the vocabulary, and StableMoE routes by the token ids it knows; use "
        "form='clean'",
    )
    changed = replace(model.config, vocab_size=vocabulary.size, dropout=config.dropout)
    backbone = cast(LanguageModel, build_model(changed))
    embeddings = ("embed.", "unembed.")
    others = {name: v for name, v in model.state_dict().items() if not name.startswith(embeddings)}
    backbone.load_state_dict(others, strict=False)
    return backbone


_WIDTH = 32  # the length of a padded batch is a multiple of this

FIRST, LAST = "CLS", "S"  # around each sentence in the paper's form; other words are lower case


def published_vocabulary(sentences: Iterable[Sentence]) -> WordVocabulary:
    """Make a vocabulary of all words in lower case, in order of appearance."""
    words = dict.fromkeys(word for text, _ in sentences for word in text.lower().split())
    special = (EOS, UNK, FIRST, LAST)
    return WordVocabulary((*special, *(word for word in words if word not in special)))


def published_encoding(
    sentences: Iterable[Sentence], vocabulary: WordVocabulary
) -> list[EncodedSentence]:
    """Encode sentences in lower case, each between the words CLS and S."""
    return [
        EncodedSentence(
            np.array([vocabulary.id_of(word) for word in (FIRST, *text.lower().split(), LAST)]),
            label,
        )
        for text, label in sentences
    ]


def pad_to_multiple(batch: SentenceBatch) -> SentenceBatch:
    """Pad to a multiple of 32 positions: batches of few shapes need few compiled kernels."""
    extra = -batch.tokens.shape[1] % _WIDTH
    tokens_BL, mask_BL = (
        nn.functional.pad(tensor, (0, extra)) for tensor in (batch.tokens, batch.token_mask)
    )
    return batch._replace(tokens=tokens_BL, token_mask=mask_BL)


def pad_left(batch: SentenceBatch) -> SentenceBatch:
    """Move the padding to the left, so that all sentences end at the last position."""
    length = batch.tokens.shape[1]
    shift_B = length - 1 - batch.last
    column_BL = torch.arange(length) - shift_B[:, None]
    tokens_BL = batch.tokens.gather(1, column_BL.clamp(min=0)).masked_fill(column_BL < 0, 0)
    last_B = torch.full_like(batch.last, length - 1)
    return SentenceBatch(tokens_BL, column_BL >= 0, last_B, batch.labels)
