"""Padded batches of sentences for finetuning, encoded with a pretraining vocabulary.

Shape letters: B sentences, L length of the longest one.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from acmoe.data.seeding import derive_seed
from acmoe.data.text.sentences import Sentence
from acmoe.data.text.vocabulary import Ids, Vocabulary, WordVocabulary
from acmoe.errors import check

_WORD_OR_SIGN = re.compile(r"\w+|[^\w\s]")


class EncodedSentence(NamedTuple):
    """Token ids, ending with the end-of-line token if the vocabulary has one, and the class."""

    tokens: Ids
    label: int


class SentenceBatch(NamedTuple):
    """Right-padded sentences.

    `token_mask` is True for real tokens, `last` is the position of each sentence's last token.
    """

    tokens: Tensor
    token_mask: Tensor
    last: Tensor
    labels: Tensor


def encode_sentences(
    sentences: Sequence[Sentence], vocabulary: Vocabulary
) -> list[EncodedSentence]:
    """Encode each sentence, followed by an end-of-line token.

    A word that is not in the vocabulary is split at its punctuation, since texts such as
    Banking-77's are not tokenised ("card?"); parts that are still unknown become `<unk>`.
    """
    return [EncodedSentence(_encode(text, vocabulary), label) for text, label in sentences]


def _encode(text: str, vocabulary: Vocabulary) -> Ids:
    if isinstance(vocabulary, WordVocabulary):
        words = sentence_words(text, vocabulary)
        return np.array([*map(vocabulary.id_of, words), vocabulary.eos_id], dtype=np.int64)
    end = [] if vocabulary.eos_id is None else [vocabulary.eos_id]
    return np.append(vocabulary.encode(text), np.array(end, dtype=np.int64))


def sentence_words(text: str, vocabulary: WordVocabulary) -> list[str]:
    """Split a sentence into words, and unknown words at their punctuation."""
    return [part for word in text.split() for part in _parts(word, vocabulary)]


def _parts(word: str, vocabulary: WordVocabulary) -> list[str]:
    return [word] if word in vocabulary.ids else _WORD_OR_SIGN.findall(word)


def sentence_batches(
    sentences: Sequence[EncodedSentence],
    *,
    batch: int,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = False,
) -> Iterator[SentenceBatch]:
    """Yield batches with every sentence once; a shuffled order follows from seed and epoch."""
    check(batch >= 1, f"batch={batch} must be 1 or more sentences")
    order = torch.arange(len(sentences))
    if shuffle:
        generator = torch.Generator().manual_seed(derive_seed(seed, "sentences of epoch", epoch))
        order = torch.randperm(len(sentences), generator=generator)
    for start in range(0, len(sentences), batch):
        yield collate([sentences[i] for i in order[start : start + batch].tolist()])


def collate(sentences: Sequence[EncodedSentence]) -> SentenceBatch:
    """Pad sentences on the right to the longest; padding is token 0, masked out."""
    lengths = [len(sentence.tokens) for sentence in sentences]
    tokens_BL = torch.zeros(len(sentences), max(lengths), dtype=torch.int64)
    for row, sentence in enumerate(sentences):
        tokens_BL[row, : lengths[row]] = torch.from_numpy(sentence.tokens)
    last_B = torch.tensor(lengths) - 1
    mask_BL = torch.arange(max(lengths)) <= last_B[:, None]
    return SentenceBatch(tokens_BL, mask_BL, last_B, torch.tensor([s.label for s in sentences]))
