"""Generate text token by token.

Every step runs one new token per sequence against cached keys, values and routing statistics. With
a plain router, and with `running` or `prefix` statistics, its logits equal those of a forward pass
over the whole text, and a batch of prompts of any lengths gives the same tokens as each prompt
alone.

Shapes: B sequences, L prompt length with padding, V words.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from acmoe.config.routing import ExpertChoiceConfig, base_router
from acmoe.config.text.language import LanguageConfig
from acmoe.errors import NonFiniteError, check, check_seed
from acmoe.ops.checks import check_range, check_whole

if TYPE_CHECKING:
    from acmoe.models.text.decoder import LanguageModel
    from acmoe.models.text.memory import DecodeCache

Prompt = Tensor | Sequence[Tensor] | Sequence[Sequence[int]]
BLOCK = 256  # generated tokens that are kept apart
COLDEST = 1e-20  # at a lower temperature quotients would overflow; the likeliest token is sure here


@torch.no_grad()
def generate(
    model: "LanguageModel",
    prompt: Prompt,
    max_new_tokens: int,
    *,
    prompt_mask: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return (B, at most max_new_tokens): the tokens that follow each prompt.

    Args:
        model: put in evaluation mode for the call.
        prompt: (B, L) ids, (L,) ids of one prompt, or a list of prompts of any lengths.
        max_new_tokens: the most tokens to add.
        prompt_mask: (B, L) True for real tokens of a padded prompt; padding is on the left.
        temperature: 0 takes the most likely token, whatever top_k, top_p and seed are; otherwise
            logits are divided by it and sampled.
        top_k: sample among the k most likely tokens.
        top_p: sample among the fewest tokens whose probabilities sum to at least top_p.
        stop_token: ends a sequence; shorter sequences are padded with it.
        seed: seed of the sampling; the same seed gives the same tokens.
        generator: used instead of a seed, on the model's device.
        on_token: called in each step with the (B,) new tokens, so that a caller can show them
            before all are there.
    """
    check(seed is None or generator is None, "seed and generator are both given; give one of them")
    if seed is not None:
        check_seed(seed)
    _check_options(model, max_new_tokens, temperature, top_k, top_p, stop_token)
    device = model.embed.weight.device
    if seed is not None:
        generator = torch.Generator(device=device).manual_seed(seed)
    tokens_BL, mask_BL = _batch(prompt, prompt_mask, model.config.vocab_size, device)
    draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    was_training = model.training
    model.eval()
    try:
        return _continue(model, tokens_BL, mask_BL, max_new_tokens, draw, stop_token, on_token)
    finally:
        model.train(was_training)


def _continue(
    model: "LanguageModel",
    tokens_BL: Tensor,
    mask_BL: Tensor | None,
    max_new_tokens: int,
    draw: Callable[[Tensor], Tensor],
    stop_token: int | None,
    on_token: Callable[[Tensor], None] | None,
) -> Tensor:
    """Prefill the cache with the prompts, then decode until done."""
    cache = model.new_cache(tokens_BL.shape[0])
    logits_BV = next_logits(model, tokens_BL, cache, mask_BL)
    _check_finite(logits_BV)
    step = model.decode_steps(model, cache, max_new_tokens - 1, stop_token is not None)
    done_B = torch.zeros_like(tokens_BL[:, 0], dtype=torch.bool)
    # A tensor of its own for each of many tokens would take a hundred times their memory.
    blocks: list[Tensor] = []
    chosen: list[Tensor] = []
    for count in itertools.count(1):
        token_B = draw(logits_BV)
        if stop_token is not None:
            token_B = token_B.masked_fill(done_B, stop_token)
            done_B = done_B | (token_B == stop_token)
        chosen.append(token_B)
        if on_token is not None:
            on_token(token_B)
        last = count == max_new_tokens or (stop_token is not None and bool(done_B.all()))
        if last or len(chosen) == BLOCK:
            blocks.append(torch.stack(chosen, dim=1))
            chosen.clear()
        if last:
            break
        # Mask a finished sequence: under batch statistics it must not influence the others.
        going_B1 = None if stop_token is None else ~done_B[:, None]
        logits_BV = step(token_B[:, None], going_B1)
    return torch.cat(blocks, dim=1)


# (B, 1) new tokens and their mask, or None, to the (B, V) logits of the next ones. The result may
# be overwritten by the next step.
DecodeStep = Callable[[Tensor, Tensor | None], Tensor]


class DecodeSteps(Protocol):
    """Makes the function that takes the decode steps after a prompt."""

    def __call__(
        self, model: "LanguageModel", cache: "DecodeCache", most_steps: int, masked: bool
    ) -> DecodeStep: ...


def decode_steps(
    model: "LanguageModel", cache: "DecodeCache", most_steps: int, masked: bool
) -> DecodeStep:
    """Return the function that adds one token per sequence to the cache, which holds the prompt.

    It is the definition; `acmoe.fast.accelerate` installs a faster one. most_steps: the number of
    steps to come, at most. masked: True if steps are given a mask.
    """
    return lambda tokens_B1, mask_B1: next_logits(model, tokens_B1, cache, mask_B1)


def next_logits(
    model: "LanguageModel", tokens: Tensor, cache: "DecodeCache", token_mask: Tensor | None = None
) -> Tensor:
    """Return the (B, V) logits after the (B, L) new tokens, which are added to the cache."""
    x_BLD, _, _ = model.hidden_states(tokens, token_mask=token_mask, cache=cache)
    logits: Tensor = model.unembed(x_BLD[:, -1])
    return logits


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return (B,): one sampled id per row of (B, V) logits."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / max(temperature, COLDEST)
    probability_BV = keep_likely(logits, top_k, top_p).softmax(-1)
    return torch.multinomial(probability_BV, 1, generator=generator)[:, 0]


def keep_likely(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Set logits outside the top_k, then outside the top_p nucleus, to -inf."""
    order_BV = logits.argsort(dim=-1, descending=True, stable=True)
    sorted_BV = logits.gather(-1, order_BV)
    if top_k is not None:
        sorted_BV[:, top_k:] = -torch.inf
    if top_p is not None:
        probability_BV = sorted_BV.softmax(-1)
        # Keep a token if those before it sum to less than top_p; the first is always kept.
        before_BV = probability_BV.cumsum(-1) - probability_BV
        sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order_BV, sorted_BV)


def _check_finite(logits_BV: Tensor) -> None:
    """Raise unless some token of each row can be sampled; -inf forbids a token and is allowed."""
    if not bool(logits_BV.logsumexp(-1).isfinite().all()):
        raise NonFiniteError(
            "the model gives NaN or infinity after the prompt; load one with finite weights"
        )


def _batch(
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
    real_BL = tokens_BL if mask_BL is None else tokens_BL.masked_fill(~mask_BL, 0)
    check_range(real_BL, 0, vocab_size, "prompt")
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


def _check_options(
    model: "LanguageModel",
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_token: int | None,
) -> None:
    """Raise a UserError for an option out of range."""
    check_whole(max_new_tokens, "max_new_tokens")
    for name, value in (("temperature", temperature), ("top_p", 1 if top_p is None else top_p)):
        check(hasattr(value, "__float__"), f"{name}={value!r}; it must be a number")
    check(temperature >= 0, f"temperature={temperature}; it must be 0 (greedy) or more")
    if top_k is not None:
        check_whole(top_k, "top_k")
    check(top_p is None or 0 < top_p <= 1, f"top_p={top_p}; it must lie in (0, 1]")
    check(
        stop_token is None or 0 <= stop_token < model.config.vocab_size,
        f"stop_token={stop_token}; the vocabulary is 0 to {model.config.vocab_size - 1}",
    )
    check_generates(model.config)


def check_generates(config: LanguageConfig) -> None:
    """Raise a UserError for a model whose router cannot choose experts for the next token."""
    check(
        not isinstance(base_router(config.router), ExpertChoiceConfig),
        "router='expert-choice' picks among all tokens of a text and cannot choose for the next "
        "one; train a model with another router to generate",
    )
