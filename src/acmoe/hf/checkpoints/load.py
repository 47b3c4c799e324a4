"""Read a model and its tokenizer from a folder. Nothing is downloaded, and no remote code runs."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.utils import logging

from acmoe.errors import UserError, check, first_line

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# A folder with none of these has no tokenizer; transformers would build one without a vocabulary.
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"),
    *("tokenizer_config.json", "tekken.json", "*.tiktoken"),
)


READ_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


class TokenText(NamedTuple):
    """A tokenised text: its ids, and the piece of the text that each stands for."""

    ids: list[int]
    pieces: list[str]
    start: int | None  # the token that begins a sequence, if the tokenizer adds one


def load_config(folder: Path) -> Any:
    """Read the config of a decoder with a model type that transformers itself knows."""
    check(
        (folder / "config.json").is_file(),
        f"{folder} holds no model: {folder / 'config.json'} is missing; give a folder that "
        "save_pretrained wrote, or a downloaded snapshot",
    )
    config = _attempt(folder, lambda: AutoConfig.from_pretrained(folder, **LOCAL))
    check(
        config.model_type != "acmoe",
        f"{folder} is a run that acmoe exported; give `acmoe export {folder} --to run OUT`, then "
        "`acmoe analyze OUT`",
    )
    check(
        not getattr(config, "is_encoder_decoder", False),
        f"{folder} is an encoder-decoder ({config.model_type}), whose two stacks read different "
        "tokens; analyze a decoder",
    )
    return config


def load_model(folder: Path, device: torch.device) -> Any:
    """Load the model in evaluation mode: in float32 on a CPU, elsewhere as it was saved.

    Raise a `UserError` where weights are missing, which transformers would draw at random.
    """
    config = load_config(folder)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None:  # such as the class of an attached model
        autos = (AutoModelForCausalLM, AutoModelForImageTextToText)
        kind = next((one for one in autos if type(config) in one._model_mapping), AutoModel)
    dtype = torch.float32 if device.type == "cpu" else "auto"
    logging.disable_progress_bar()
    model, info = _attempt(
        folder,
        lambda: kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, **LOCAL),
    )
    missing = sorted(info["missing_keys"])
    check(
        not missing,
        f"{folder} lacks {len(missing)} weights of {type(model).__name__}, such as "
        f"{missing[0] if missing else ''}; save the whole model again",
    )
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that lies beside a model."""
    check(
        any(any(folder.glob(name)) for name in TOKENIZERS),
        f"{folder} has no tokenizer; add its files (tokenizer.save_pretrained({str(folder)!r})), "
        "or use --bytes for a model of bytes",
    )
    return _attempt(folder, lambda: AutoTokenizer.from_pretrained(folder, **LOCAL))


def tokenize(tokenizer: Any, text: str) -> TokenText:
    """Tokenise a text without special tokens; the pieces, joined, are the text again.

    A piece reaches from the end of the token before to the end of its own, so that it keeps the
    spaces. Slow tokenizers have no offsets; their pieces are the tokens' own spelling.
    """
    options = {"add_special_tokens": False, "verbose": False}
    if not tokenizer.is_fast:
        ids = tokenizer(text, **options)["input_ids"]
        pieces = [one.replace("\u2581", " ") for one in tokenizer.convert_ids_to_tokens(ids)]
        return TokenText(ids, pieces, _start(tokenizer))
    found = tokenizer(text, return_offsets_mapping=True, **options)
    pieces, done = [], 0
    for _, end in found["offset_mapping"]:
        pieces.append(text[done:end])
        done = max(done, end)
    return TokenText(found["input_ids"], pieces, _start(tokenizer))


def tokenize_bytes(text: str) -> TokenText:
    """Take the UTF-8 bytes of a text as token ids."""
    data = text.encode("utf-8", "surrogateescape")
    pieces = [chr(one) if one < 128 else f"\\x{one:02x}" for one in data]
    return TokenText(list(data), pieces, None)


def _start(tokenizer: Any) -> int | None:
    """Return the token that the tokenizer puts before a text, if it is its `bos_token`."""
    first = tokenizer("a")["input_ids"][:1]
    return first[0] if first and first[0] == tokenizer.bos_token_id else None


def _attempt(folder: Path, load: Any) -> Any:
    try:
        return load()
    except READ_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{folder} cannot be read: {first_line(error)}; give a folder that save_pretrained "
            "wrote, or download it again"
        ) from error
