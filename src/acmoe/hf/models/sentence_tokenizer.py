"""The tokenizer of sentence classifiers with a word vocabulary.

A word that the vocabulary lacks is split at its punctuation ("card?" into "card" and "?"), a word
that it has is not ("U.S."). The tokenizers library cannot say this, so it is Python.
"""

from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from acmoe.data.text.sentence_batches import sentence_words
from acmoe.data.text.vocabulary import (
    EOS,
    UNK,
    WordVocabulary,
    load_vocabulary,
    save_vocabulary,
)
from acmoe.errors import check

PAD = "<pad>"
FILE = "vocabulary.json"


class AcmoeSentenceTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Words of a sentence, then `<eos>`: the ids of `acmoe finetune` in its clean form."""

    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": FILE}
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(
        self,
        vocab_file: str | None = None,
        vocabulary: WordVocabulary | None = None,
        **kwargs: Any,
    ) -> None:
        if vocabulary is None:
            check(vocab_file is not None, "there is no vocabulary; give vocab_file or vocabulary")
            found = load_vocabulary(Path(str(vocab_file)))
            check(
                isinstance(found, WordVocabulary),
                f"{vocab_file} is no vocabulary of words; give the one of a run on words",
            )
            assert isinstance(found, WordVocabulary)
            vocabulary = found
        self.vocabulary = vocabulary
        special = {"unk_token": UNK, "eos_token": EOS, "pad_token": PAD}
        fixed = {"special_tokens_pattern": "eos", "split_special_tokens": True}
        super().__init__(**{**special, "padding_side": "right", **kwargs, **fixed})

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def get_vocab(self) -> dict[str, int]:
        return {**self.vocabulary.ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return sentence_words(text, self.vocabulary)

    def _convert_token_to_id(self, token: str) -> int:
        return self.vocabulary.id_of(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.vocabulary.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join("\n" if token == EOS else token for token in tokens)

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        name = FILE if filename_prefix is None else f"{filename_prefix}-{FILE}"
        path = Path(save_directory) / name
        save_vocabulary(self.vocabulary, path)
        return (str(path),)
