"""Time text generation: a prompt, then one token at a time, by plain and by captured steps.

Models with different routers are timed in turn, round by round. The time that a router adds to a
step is measured in rounds of a few steps (decode_steps.py). generate_models.py has the models; that
of `transformers` decodes greedily with a static cache.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acmoe.config.text.language import LanguageConfig
from acmoe.errors import check, typed_line
from acmoe.fast import accelerate, restore
from acmoe.fast.decoding import capture_unsupported
from acmoe.lab.bench.harness.added import added
from acmoe.lab.bench.harness.options import DTYPES
from acmoe.lab.bench.harness.progress import Say, silent
from acmoe.lab.bench.harness.results import Report, new_report
from acmoe.lab.bench.models.decode_steps import seconds_of, steps_in_turn
from acmoe.lab.bench.models.generate_models import build_ours, build_transformers, model_config
from acmoe.models.registry import list_models
from acmoe.models.text.decoder import LanguageModel
from acmoe.runtime import pick_device

CONTESTANTS = ("plain", "captured", "transformers")
Generate = Callable[[int], object]  # decodes that many tokens after the prompt

# Failures of a call that leave its rows without figures, such as too little memory.
_FAILURES = (RuntimeError, ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True, kw_only=True)
class GenerateBenchConfig:
    """Options of `acmoe bench generate`."""

    models: tuple[str, ...] = ()  # empty: switch-medium and olmoe, or on a CPU switch-nano
    batches: tuple[int, ...] = (1, 64)
    contestants: tuple[str, ...] = CONTESTANTS
    router: tuple[str, ...] = ("smoe",)
    prompt: int = 128
    tokens: int = 128
    repeat: int = 3
    dtype: str = "bf16"
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.models:
            known = ("olmoe", *list_models())
            check(name in known, f"model {name!r} is unknown; choose among {', '.join(known)}")
            config = model_config(name)
            check(
                isinstance(config, LanguageConfig),
                f"model {name!r} generates no text; choose a language model",
            )
        for name in self.contestants:
            known_ways = ", ".join(CONTESTANTS)
            check(name in CONTESTANTS, f"contestant {name!r} is unknown; choose among {known_ways}")
        check(len(self.router) >= 1, "router is empty; name one at least")
        check(self.dtype in DTYPES, f"dtype={self.dtype!r} is unknown; choose bf16, fp16 or fp32")
        tokens = f"tokens={self.tokens}; half of them are timed against all: give at least 2"
        check(self.tokens >= 2, tokens)
        check(self.prompt >= 1, f"prompt={self.prompt}; it must be at least 1")
        check(self.repeat >= 1, f"repeat={self.repeat}; it must be at least 1")
        for batch in self.batches:
            check(batch >= 1, f"batches={batch}; each must be at least 1")


@dataclass(frozen=True, kw_only=True)
class GenerateRow:
    """Result of one model, batch and way to decode.

    A step's time is that of the second half of the tokens: what all tokens take, less what half of
    them take. So it has no share of the prompt, and none of the capture.
    """

    model: str
    batch: int
    contestant: str
    router: str = ""  # empty: that of the other package
    refused: str | None = None
    ms_per_step: float | None = None
    tokens_per_second: float | None = None  # all sequences, by that step
    seconds: float | None = None  # the whole call: prompt, capture and all steps
    # How much longer a step takes than with the first router: median over rounds, 95% interval.
    added_percent: float | None = None
    added_percent_low: float | None = None
    added_percent_high: float | None = None


def bench_generate(config: GenerateBenchConfig, *, command: str, say: Say = silent) -> Report:
    """Measure and return the report."""
    device = pick_device(config.device)
    usual = ("switch-medium", "olmoe") if device.type == "cuda" else ("switch-nano",)
    rows: list[GenerateRow] = []
    for name in config.models or usual:
        rows += _measured(name, config, device, say)
    return new_report("generate", device, command, config, [asdict(row) for row in rows])


def _measured(
    name: str, config: GenerateBenchConfig, device: torch.device, say: Say
) -> list[GenerateRow]:
    rows: list[GenerateRow] = []
    ours = [one for one in config.contestants if one != "transformers"]
    dtype = DTYPES[config.dtype]
    models = [
        (one, build_ours(name, one, dtype=dtype, seed=config.seed, device=device))
        for one in config.router
        if ours
    ]
    for batch in config.batches:
        for contestant in ours:
            rows += _by_routers(name, batch, contestant, models, config, device, say)
    del models
    if "transformers" in config.contestants and name == "olmoe":
        rows += _transformers_rows(config, device, say)
    return rows


def _by_routers(
    name: str,
    batch: int,
    contestant: str,
    models: list[tuple[str, LanguageModel]],
    config: GenerateBenchConfig,
    device: torch.device,
    say: Say,
) -> list[GenerateRow]:
    """Measure one way to decode with every router, in turn."""
    who = [
        GenerateRow(model=name, batch=batch, contestant=contestant, router=one) for one, _ in models
    ]
    prompts = []
    for row, (_, model) in zip(who, models, strict=True):
        reason = None
        if contestant == "captured":
            reason = capture_unsupported(model, config.tokens // 2 - 1)
        if reason is not None:
            return [replace(one, refused=f"{row.router}: {reason}") for one in who]
        (accelerate if contestant == "captured" else restore)(model)
        draw = torch.randint(model.config.vocab_size, (batch, config.prompt), device=device)
        prompts.append(draw)
    ours = [model for _, model in models]
    calls = [_by(model, prompt) for model, prompt in zip(ours, prompts, strict=True)]
    rows = _rows(who, config, calls, device)
    if len(models) > 1 and rows[0].refused is None:
        rows = _compared(rows, ours, prompts)
    for row in rows:
        say(f"{name}, {row.router}, batch {batch}, {contestant}: {_told(row)}")
    return rows


def _compared(
    rows: list[GenerateRow], models: list[LanguageModel], prompts: list[Tensor]
) -> list[GenerateRow]:
    """Return the rows with the time that each adds to the first; if a step fails, all refused."""
    try:
        taken = steps_in_turn(models, prompts)  # all models have a cache at once
    except _FAILURES as error:
        return [replace(row, refused=typed_line(error)) for row in rows]
    found = rows[:1]
    for row, seconds in zip(rows[1:], taken[1:], strict=True):
        _, more, low, high = added(seconds, taken[0])
        found.append(
            replace(row, added_percent=more, added_percent_low=low, added_percent_high=high)
        )
    return found


def _told(row: GenerateRow) -> str:
    if row.refused is not None:
        return row.refused
    step = f"{row.ms_per_step:.3f} ms a step, {row.tokens_per_second:,.0f} tokens a second"
    return step if row.added_percent is None else f"{step}, {row.added_percent:+.1f}%"


def _by(model: LanguageModel, prompt: Tensor) -> Generate:
    return lambda tokens: model.generate(prompt, tokens, temperature=0)


def _transformers_rows(
    config: GenerateBenchConfig, device: torch.device, say: Say
) -> list[GenerateRow]:
    """Measure OLMoE of transformers, if the package is installed."""
    if importlib.util.find_spec("transformers") is None:
        reason = "transformers is not installed"
        return [
            GenerateRow(model="olmoe", batch=batch, contestant="transformers", refused=reason)
            for batch in config.batches
        ]
    model = build_transformers(dtype=DTYPES[config.dtype], seed=config.seed, device=device)
    rows = []
    for batch in config.batches:
        prompt = torch.randint(model.config.vocab_size, (batch, config.prompt), device=device)
        generate = _transformers_generate(model, prompt)
        who = GenerateRow(model="olmoe", batch=batch, contestant="transformers")
        rows += _rows([who], config, [generate], device)
        say(f"olmoe, batch {batch}, transformers: {_told(rows[-1])}")
    return rows


def _transformers_generate(model: Any, prompt: Tensor) -> Generate:
    def generate(tokens: int) -> object:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
        )

    return generate


def _rows(
    who: list[GenerateRow],
    config: GenerateBenchConfig,
    calls: list[Generate],
    device: torch.device,
) -> list[GenerateRow]:
    """Time all calls in every round; return one row for each; if one fails, all are refused."""
    half = config.tokens // 2
    times: list[list[tuple[float, float]]] = [[] for _ in calls]  # half the tokens, all
    try:
        for generate in calls:
            for tokens in (half, config.tokens):  # compiles
                generate(tokens)
        for _ in range(config.repeat):
            for generate, taken in zip(calls, times, strict=True):
                short, long = (_seconds(generate, one, device) for one in (half, config.tokens))
                taken.append((short, long))
    except _FAILURES as error:
        return [replace(row, refused=typed_line(error)) for row in who]
    rows: list[GenerateRow] = []
    for row, taken in zip(who, times, strict=True):
        short, long = (min(one[number] for one in taken) for number in (0, 1))
        step = max(long - short, 1e-9) / (config.tokens - half)
        rate = row.batch / step
        rows.append(replace(row, ms_per_step=1e3 * step, tokens_per_second=rate, seconds=long))
    return rows


def _seconds(generate: Generate, tokens: int, device: torch.device) -> float:
    return seconds_of(lambda: generate(tokens), device)
