"""Generate text token by token.

Every step runs one new token per sequence against cached keys, values and routing statistics. With
a plain router, and with `running` or `prefix` statistics, its logits equal those of a forward pass
over the whole text, and a batch of prompts of any lengths gives the same tokens as each prompt
alone.

Shapes: B sequences, L prompt length with padding, V words.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from acmoe.config.routing import ExpertChoiceConfig, base_router
from acmoe.config.text.language import LanguageConfig
from acmoe.errors import NonFiniteError, check, check_seed
from acmoe.models.text.prompt import Prompt, batch_prompts
from acmoe.ops.checks import check_whole

if TYPE_CHECKING:
    from acmoe.models.text.decoder import LanguageModel
    from acmoe.models.text.memory import DecodeCache

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
        model: put in evaluation mode for the call; then every module has its mode again.
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

    Logits of NaN or infinity raise a NonFiniteError: after the prompt at once, after generated
    tokens at the latest when 256 more are there, since every check waits for the device.
    """
    check(seed is None or generator is None, "seed and generator are both given; give one of them")
    if seed is not None:
        check_seed(seed)
    _check_options(model, max_new_tokens, temperature, top_k, top_p, stop_token)
    device = model.embed.weight.device
    if seed is not None:
        generator = torch.Generator(device=device).manual_seed(seed)
    tokens_BL, mask_BL = batch_prompts(prompt, prompt_mask, model.config.vocab_size, device)
    draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return _continue(model, tokens_BL, mask_BL, max_new_tokens, draw, stop_token, on_token)
    finally:
        model.train(modes[0][1])  # a module may have a `train` of its own, which undoes its `eval`
        for module, training in modes:
            module.training = training


def _continue(
    model: "LanguageModel",
    tokens_BL: Tensor,
    mask_BL: Tensor | None,
    max_new_tokens: int,
    draw: Callable[[Tensor], Tensor],
    stop_token: int | None,
    on_token: Callable[[Tensor], None] | None,
) -> Tensor:
    """Prefill the cache with the prompts, then decode until every sequence has ended."""
    cache = model.new_cache(tokens_BL.shape[0])
    logits_BV = next_logits(model, tokens_BL, cache, mask_BL)
    _check_prompt(logits_BV)
    step = model.decode_steps(model, cache, max_new_tokens - 1, stop_token is not None)
    done_B = torch.zeros_like(tokens_BL[:, 0], dtype=torch.bool)
    chosen = ChosenTokens()
    count = 0  # tokens generated so far for each sequence
    while True:
        if stop_token is not None:
            # A finished sequence is not read; torch cannot sample from a row of NaN.
            logits_BV = logits_BV.masked_fill(done_B[:, None], 0.0)
        token_B = _draw(draw, logits_BV, count)
        logit_B = logits_BV.gather(1, token_B[:, None])[:, 0]
        if stop_token is not None:
            token_B = token_B.masked_fill(done_B, stop_token)
            done_B = done_B | (token_B == stop_token)
        if on_token is not None:
            on_token(token_B)
        chosen.add(token_B, logit_B)
        count += 1
        if count == max_new_tokens or (stop_token is not None and bool(done_B.all())):
            return chosen.joined()
        # Mask a finished sequence: under batch statistics it must not influence the others.
        going_B1 = None if stop_token is None else ~done_B[:, None]
        logits_BV = step(token_B[:, None], going_B1)


class ChosenTokens:
    """The generated tokens. Every BLOCK of them is checked and becomes one tensor.

    A tensor of its own for each of many tokens would take a hundred times their memory.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # (B, BLOCK) tokens
        self._tokens: list[Tensor] = []  # (B,) those after the last block
        self._logits: list[Tensor] = []  # (B,) the logits by which they were chosen

    def add(self, token_B: Tensor, logit_B: Tensor) -> None:
        """Add a token of each sequence, and its logit."""
        self._tokens.append(token_B)
        self._logits.append(logit_B)
        if len(self._tokens) == BLOCK:
            self._close_block()

    def joined(self) -> Tensor:
        """Return (B, N) all tokens."""
        if self._tokens:
            self._close_block()
        return torch.cat(self._blocks, dim=1)

    def _close_block(self) -> None:
        _check_chosen(self._logits, BLOCK * len(self._blocks))
        self._blocks.append(torch.stack(self._tokens, dim=1))
        self._tokens.clear()
        self._logits.clear()


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


def _check_prompt(logits_BV: Tensor) -> None:
    """Raise unless some token of each row can be sampled; -inf forbids a token and is allowed."""
    if not _can_be_sampled(logits_BV):
        raise _non_finite("the prompt")


def _draw(draw: Callable[[Tensor], Tensor], logits_BV: Tensor, before: int) -> Tensor:
    """Draw the tokens after `before` generated ones; name the fault if torch cannot sample."""
    try:
        return draw(logits_BV)
    except RuntimeError as error:
        if _can_be_sampled(logits_BV):
            raise
        raise _non_finite(f"{before} new tokens") from error


def _check_chosen(logits: list[Tensor], before: int) -> None:
    """Raise unless the (B,) logits of all chosen tokens are finite; `before` came before them.

    Where logits are NaN or infinity, torch cannot sample, and the likeliest token has such a logit.
    """
    finite = torch.stack(logits).isfinite().all(1).tolist()
    if not all(finite):
        raise _non_finite(f"{before + finite.index(False)} new tokens")


def _can_be_sampled(logits_BV: Tensor) -> bool:
    return bool(logits_BV.logsumexp(-1).isfinite().all())


def _non_finite(after: str) -> NonFiniteError:
    return NonFiniteError(
        f"the model gives NaN or infinity after {after}; load one with finite weights"
    )


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
    if stop_token is not None:
        whole = hasattr(stop_token, "__index__") and not isinstance(stop_token, bool)
        check(whole, f"stop_token={stop_token!r}; it must be a whole number")
        check(
            0 <= stop_token < model.config.vocab_size,
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
