"""A run's vocabulary as a transformers tokenizer: the same ids as the library's own encoding.

Both kinds have one id more than the model: `<pad>`, the number of symbols. The model masks it.
Special tokens are never recognised inside a text, as the library does not either.

`<eos>` of a word vocabulary is the end of a line, and decodes to a newline. As a special token it
is left out by `decode(..., skip_special_tokens=True)`, and lines are then joined. A byte vocabulary
has no special token but `<pad>`: a newline is an ordinary byte.
"""

import sys
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from acmoe.data.text.vocabulary import (
    EOS,
    NEWLINE,
    UNK,
    ByteVocabulary,
    Vocabulary,
    WordVocabulary,
)
from acmoe.hf.models.sentence_tokenizer import PAD, AcmoeSentenceTokenizer
from acmoe.train.finetune.classifier import FIRST, LAST


def tokenizer_of(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a vocabulary; prompts are padded on the left."""
    if isinstance(vocabulary, ByteVocabulary):
        return _wrapped(byte_tokenizer(vocabulary), padding_side="left")
    special = {"unk_token": UNK, "eos_token": EOS}
    return _wrapped(word_tokenizer(vocabulary), padding_side="left", **special)


def sentence_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return the tokenizer of finetuning in the clean form: an end-of-line token follows a text."""
    if isinstance(vocabulary, WordVocabulary):
        return AcmoeSentenceTokenizer(vocabulary=vocabulary)
    found = byte_tokenizer(vocabulary)
    if vocabulary.eos_id is not None:
        newline = byte_names()[NEWLINE]
        found.post_processor = processors.TemplateProcessing(
            single=f"$A {newline}", special_tokens=[(newline, vocabulary.eos_id)]
        )
    return _wrapped(found, padding_side="right")


def published_tokenizer(vocabulary: WordVocabulary) -> PreTrainedTokenizerFast:
    """Return the tokenizer of finetuning in the paper's form: lower case, between CLS and S.

    It pads on the left with token 0, which the published classifier reads.
    """
    found = word_tokenizer(vocabulary)
    # A newline is whitespace here, not `<eos>`.
    found.normalizer = normalizers.Lowercase()
    ends = [(word, vocabulary.id_of(word)) for word in (FIRST, LAST)]
    found.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A {LAST}", special_tokens=ends
    )
    return _wrapped(found, padding_side="left", unk_token=UNK, pad_token=EOS)


def byte_tokenizer(vocabulary: ByteVocabulary) -> Tokenizer:
    """Return a tokenizer of UTF-8 bytes: token i is the i-th value of the vocabulary.

    Values outside the vocabulary become `?`, as in the library.
    """
    names = byte_names()
    symbols = {names[value]: number for number, value in enumerate(vocabulary.values)}
    unknown = "?" if "?" in symbols else None
    found = Tokenizer(BPE(vocab=symbols, merges=[], unk_token=unknown))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return found


def byte_names() -> list[str]:
    """Return the character that stands for each of the 256 bytes in GPT-2's byte-level alphabet.

    Printable Latin-1 characters stand for themselves, the others are numbered from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(value if value in printable else next(others)) for value in range(256)]


def word_tokenizer(vocabulary: WordVocabulary) -> Tokenizer:
    """Return a tokenizer of whitespace-separated words; a newline is `<eos>`."""
    found = Tokenizer(WordLevel(vocab=vocabulary.ids, unk_token=UNK))
    found.normalizer = normalizers.Replace("\n", f" {EOS} ")
    found.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{_whitespace()}]+"), "removed")
    # The second decoder puts a space between words; no word begins with its prefix.
    found.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(f"^{EOS}$"), "\n"),
            decoders.WordPiece(prefix="\0\0", cleanup=False),
        ]
    )
    return found


def _whitespace() -> str:
    """Return all characters at which `str.split` splits."""
    return "".join(chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace())


def _wrapped(found: Tokenizer, pad_token: str = PAD, **options: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=found,
        pad_token=pad_token,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **options,
    )
