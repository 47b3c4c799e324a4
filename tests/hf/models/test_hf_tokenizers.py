"""Tokenizers: the ids of the library's own encoding, for every text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acmoe.data.text.sentence_batches import encode_sentences
from acmoe.data.text.vocabulary import ByteVocabulary, WordVocabulary

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from acmoe.hf.models.tokenizers import (
    byte_names,
    published_tokenizer,
    sentence_tokenizer,
    tokenizer_of,
)
from acmoe.train.finetune.classifier import published_encoding, published_vocabulary

BYTES = ByteVocabulary(bytes(range(256)))
FEW = ByteVocabulary(bytes(range(32, 127)))
WORDS = WordVocabulary(("<eos>", "the", "<unk>", "cat", "a<eos>b", ",", "é"))

# Names of special tokens, of bytes in GPT-2's alphabet, and all kinds of whitespace.
TRICKY = "the cat\r\n<pad>Ā Ċ \x00 <eos> a<eos>b\x1c,\u3000é\u00a0é <unk> \n\n😀"
texts = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    st.lists(st.sampled_from(("the", " ", "\n", "<eos>", "é", "\t")), max_size=8).map("".join),
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Tokenizers of three vocabularies, saved and loaded."""
    loaded = []
    for vocabulary in (BYTES, FEW, WORDS):
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer_of(vocabulary).save_pretrained(folder)
        loaded.append((vocabulary, AutoTokenizer.from_pretrained(folder)))
    return loaded


def check_text(tokenizers, text):
    for vocabulary, tokenizer in tokenizers:
        ids = vocabulary.encode(text).tolist()
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == vocabulary.decode(ids)


def test_a_tricky_text_has_the_ids_of_the_library(tokenizers):
    check_text(tokenizers, TRICKY)
    _, tokenizer = tokenizers[0]
    assert tokenizer.decode(tokenizer(TRICKY).input_ids) == TRICKY


@given(text=texts)
def test_every_text_has_the_ids_of_the_library(tokenizers, text):
    check_text(tokenizers, text)


def test_every_byte_is_its_own_token(tokenizers):
    _, tokenizer = tokenizers[0]
    names = byte_names()
    assert len(set(names)) == 256
    assert tokenizer.convert_tokens_to_ids(names) == list(range(256))
    for value in range(256):  # also those that are no text of their own
        expected = bytes([value]).decode("utf-8", errors="replace")
        assert tokenizer.decode([value], skip_special_tokens=True) == expected


def test_padding_is_the_first_id_after_the_vocabulary(tokenizers):
    for vocabulary, tokenizer in tokenizers:
        batch = tokenizer(["the cat", "the"], padding=True)
        assert batch.input_ids[1][0] == vocabulary.size
        assert batch.attention_mask[1][0] == 0
    words = tokenizers[2][1]
    assert (words.eos_token_id, words.unk_token_id) == (0, 2)


@pytest.mark.parametrize("vocabulary", [BYTES, FEW, WORDS])
def test_sentences_of_the_clean_form_end_with_a_line(vocabulary, tmp_path):
    sentence_tokenizer(vocabulary).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = ["the cat, the", "(a<eos>b) a<eos>b\nthe é?", "<pad> <eos>"]
    expected = [row.tokens.tolist() for row in encode_sentences([(r, 0) for r in rows], vocabulary)]
    assert [tokenizer(row).input_ids for row in rows] == expected
    batch = tokenizer(rows, padding=True)
    lengths = [len(ids) for ids in expected]
    assert [sum(mask) for mask in batch.attention_mask] == lengths
    assert [row[: len(ids)] for row, ids in zip(batch.input_ids, expected, strict=True)] == expected


def test_the_published_form_lowers_case_and_puts_words_around():
    sentences = [("The Cat sat", 0), ("on The mat", 1)]
    vocabulary = published_vocabulary(sentences)
    tokenizer = published_tokenizer(vocabulary)
    for text in ("The Cat sat", "a MAT\non the cat", ""):
        expected = published_encoding([(text, 0)], vocabulary)[0][0].tolist()
        assert tokenizer(text).input_ids == expected
    padded = tokenizer(["the", "the cat sat"], padding=True).input_ids
    assert padded[0][:2] == [0, 0]
