"""Sentences are encoded with the pretraining vocabulary and padded where the mask says."""

import pytest
import torch

from acmoe.data.text.sentence_batches import collate, encode_sentences, sentence_batches
from acmoe.data.text.sentences import Sentence
from acmoe.data.text.vocabulary import ByteVocabulary, WordVocabulary
from acmoe.errors import UserError

WORDS = WordVocabulary(("<eos>", "<unk>", "where", "is", "my", "card", "?", "Card", "n't"))


def test_words_end_with_the_end_of_line_and_unknown_ones_are_marked() -> None:
    (encoded,) = encode_sentences([Sentence("where is the card", 7)], WORDS)
    assert encoded.tokens.tolist() == [2, 3, 1, 5, 0]
    assert encoded.label == 7


def test_punctuation_is_split_off_only_from_words_the_vocabulary_lacks() -> None:
    (encoded,) = encode_sentences([Sentence("my card? n't", 0)], WORDS)
    assert encoded.tokens.tolist() == [4, 5, 6, 8, 0]


def test_upper_case_is_kept() -> None:
    sentence = [Sentence("Card Where", 0)]
    assert encode_sentences(sentence, WORDS)[0].tokens.tolist() == [7, 1, 0]


def test_byte_models_read_bytes() -> None:
    all_bytes = ByteVocabulary(bytes(range(256)))
    (encoded,) = encode_sentences([Sentence("É\n!", 0)], all_bytes)
    assert bytes(encoded.tokens.tolist()) == "É\n!".encode() + b"\n"
    (encoded,) = encode_sentences([Sentence("ab", 0)], ByteVocabulary(b"ab"))
    assert encoded.tokens.tolist() == [0, 1]  # no newline in this vocabulary


def test_a_batch_is_padded_on_the_right_and_knows_its_last_tokens() -> None:
    encoded = encode_sentences([Sentence("my card", 1), Sentence("where is my card", 0)], WORDS)
    batch = collate(encoded)
    assert batch.tokens.tolist() == [[4, 5, 0, 0, 0], [2, 3, 4, 5, 0]]
    assert batch.token_mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert batch.last.tolist() == [2, 4]
    assert batch.labels.tolist() == [1, 0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sentence_comes_once_an_epoch(shuffle: bool) -> None:
    encoded = encode_sentences([Sentence("card", label) for label in range(10)], WORDS)
    batches = list(sentence_batches(encoded, batch=4, shuffle=shuffle))
    assert [len(batch.labels) for batch in batches] == [4, 4, 2]
    labels = torch.cat([batch.labels for batch in batches]).tolist()
    assert sorted(labels) == list(range(10))
    assert (labels == list(range(10))) is not shuffle


def test_the_order_follows_from_seed_and_epoch() -> None:
    encoded = encode_sentences([Sentence("card", label) for label in range(50)], WORDS)

    def labels(seed: int, epoch: int) -> list[int]:
        batches = sentence_batches(encoded, batch=50, seed=seed, epoch=epoch, shuffle=True)
        return next(batches).labels.tolist()

    assert labels(0, 0) == labels(0, 0)
    assert labels(0, 0) != labels(0, 1) and labels(0, 0) != labels(1, 0)


def test_an_empty_batch_size_is_refused() -> None:
    with pytest.raises(UserError, match="batch=0 must be 1 or more sentences"):
        next(sentence_batches([], batch=0))
