"""Time the decode steps of several models in turn, a few steps at a time.

Whole calls of `generate` also fill the cache with the prompt and capture a step, which differs from
call to call by more than a router adds to its steps.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.generate import next_logits

ROUNDS, STEPS = 24, 16  # rounds, and the steps of every model in a round
_BEFORE = 4  # steps before the first round, in which a fast model captures its step


class Decoding:
    """A model that has read a prompt, and takes the most likely token in every step."""

    def __init__(self, model: LanguageModel, prompt_BL: Tensor) -> None:
        cache = model.new_cache(len(prompt_BL))
        self.logits_BV = next_logits(model, prompt_BL, cache)
        self.step = model.decode_steps(model, cache, _BEFORE + ROUNDS * STEPS, False)

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self.logits_BV = self.step(self.logits_BV.argmax(-1, keepdim=True), None)


@torch.no_grad()
def steps_in_turn(models: Sequence[LanguageModel], prompts: Sequence[Tensor]) -> list[list[float]]:
    """Return the seconds of every round of STEPS steps, for each model in evaluation mode.

    Every other round takes the models in the opposite order.
    """
    runs = [Decoding(model, prompt) for model, prompt in zip(models, prompts, strict=True)]
    for run in runs:
        run.take(_BEFORE)
    taken: list[list[float]] = [[] for _ in runs]
    for number in range(ROUNDS):
        pairs = list(zip(runs, taken, strict=True))
        for run, seconds in pairs if number % 2 == 0 else reversed(pairs):
            seconds.append(_seconds(run))
    return taken


def _seconds(run: Decoding) -> float:
    return seconds_of(lambda: run.take(STEPS), run.logits_BV.device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, from an idle GPU to an idle GPU."""
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
