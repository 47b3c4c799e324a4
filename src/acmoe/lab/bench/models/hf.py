"""Time transformers models with each experts implementation: training steps, and decoding.

One model is built and its experts implementation is switched, so that all implementations compute
with the same weights. The others are compared with transformers' own `grouped_mm`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from acmoe.errors import check, check_choice, typed_line
from acmoe.lab.bench.harness.clock import (
    Action,
    Timing,
    clock_for,
    in_mib,
    interleave,
    timings,
    warmed_memory,
)
from acmoe.lab.bench.harness.options import DTYPES
from acmoe.lab.bench.harness.progress import Say, silent, tell_times
from acmoe.lab.bench.harness.results import Report, new_report
from acmoe.lab.bench.models.hf_models import MODELS, build
from acmoe.runtime import pick_device

IMPLEMENTATIONS = ("acmoe", "grouped_mm", "eager")
BASELINE = "grouped_mm"
TRAIN, DECODE = "train", "decode"
LENGTH = 1024  # tokens of a sequence in training; fewer where --tokens is less
PROMPT = 16  # tokens of a sequence before decoding
_WARM_UP = 2
# Implementations add up in different orders. Losses further apart than this mean a mistake.
_LOSS_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class HfBenchConfig:
    """Options of `acmoe bench hf`."""

    models: tuple[str, ...] = ()  # empty: the three published ones, or on a CPU the tiny one
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    tokens: int = 8192  # tokens of a training step; 0: do not train
    batches: tuple[int, ...] = (1, 32)  # sequences that are decoded together; empty: do not decode
    new_tokens: int = 16  # tokens to decode
    layers: int | None = None  # None: the default of each model
    compile: bool = False  # let `generate` compile the decoding step
    dtype: str = "auto"  # auto: bf16 on a GPU, fp32 on a CPU
    repeat: int = 5
    device: str = "auto"

    def __post_init__(self) -> None:
        for model in self.models:
            check_choice(model, tuple(MODELS), "models")
        check(len(self.implementations) >= 1, "implementations is empty; name one, such as acmoe")
        for batch in self.batches:
            check(batch >= 1, f"batches holds {batch}; it must be at least 1")
        check_choice(self.dtype, ("auto", *DTYPES), "dtype")
        check(self.tokens >= 0, f"tokens={self.tokens}; it must be at least 0")
        check(self.new_tokens >= 1, f"new_tokens={self.new_tokens}; it must be at least 1")
        check(
            self.layers is None or self.layers >= 1,
            f"layers={self.layers}; it must be at least 1",
        )
        check(self.repeat >= 2, f"repeat={self.repeat}; quartiles need at least 2 rounds")


@dataclass(frozen=True, kw_only=True)
class HfRow:
    """Result of one model, part and implementation."""

    model: str
    layers: int
    part: str  # train: a forward and backward pass; decode: one new token
    batch: int  # sequences
    tokens: int  # tokens of a training step, or of a decoding step
    implementation: str
    refused: str | None = None  # reason: a failure, or another loss than the baseline's
    ms: float | None = None  # time of a training step, or of one new token of all sequences
    ms_low: float | None = None  # quartiles
    ms_high: float | None = None
    tokens_per_second: float | None = None
    ratio: float | None = None  # the baseline's time over this one: above 1 is faster
    baseline: str | None = None
    memory_mib: float | None = None  # peak beyond the weights; None on a CPU
    loss: float | None = None


class TrainStep:
    """Forward and backward pass of a batch of random tokens; gradients are made anew."""

    def __init__(self, model: Any, implementation: str, ids_BL: Tensor) -> None:
        self.model, self.implementation, self.ids_BL = model, implementation, ids_BL
        self.loss = torch.zeros(())

    def __call__(self) -> None:
        self.model.set_experts_implementation(self.implementation)
        self.model.zero_grad(set_to_none=True)
        loss = self.model(input_ids=self.ids_BL, labels=self.ids_BL, use_cache=False).loss
        loss.backward()
        self.loss = loss.detach()


class Decode:
    """`generate` with a static cache: greedy, without an end token, a fixed number of tokens."""

    def __init__(self, model: Any, implementation: str, ids_BL: Tensor, options: Any) -> None:
        self.model, self.implementation, self.ids_BL = model, implementation, ids_BL
        self.options = options

    def __call__(self) -> None:
        self.model.set_experts_implementation(self.implementation)
        mask_BL = torch.ones_like(self.ids_BL)
        self.model.generate(self.ids_BL, attention_mask=mask_BL, generation_config=self.options)


def bench_hf(config: HfBenchConfig, *, command: str = "", say: Say = silent) -> Report:
    device = pick_device(config.device)
    published = tuple(name for name in MODELS if name != "tiny")
    models = config.models or (published if device.type == "cuda" else ("tiny",))
    rows: list[HfRow] = []
    for name in models:
        say(f"{name}: building")
        rows += measure_model(name, config, device, say)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    kind = "hf-compile" if config.compile else "hf"
    return new_report(kind, device, command, config, [asdict(row) for row in rows])


def measure_model(
    name: str, config: HfBenchConfig, device: torch.device, say: Say = silent
) -> Iterator[HfRow]:
    """Time every part of a model with every implementation."""
    default = "bf16" if device.type == "cuda" else "fp32"
    model = build(
        name, config.layers, DTYPES[default if config.dtype == "auto" else config.dtype], device
    )
    import acmoe.hf.experts  # noqa: F401, registers "acmoe"

    if config.tokens > 0:
        length = min(LENGTH, config.tokens)
        batch = max(1, config.tokens // length)
        model.train()
        yield from _measure(name, TRAIN, model, _draw(model, batch, length), config, say)
        model.zero_grad(set_to_none=True)
    model.eval()
    for batch in config.batches:
        yield from _measure(name, DECODE, model, _draw(model, batch, PROMPT), config, say)


def _draw(model: Any, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)
    return ids.to(model.device)


def _measure(
    name: str, part: str, model: Any, ids_BL: Tensor, config: HfBenchConfig, say: Say
) -> Iterator[HfRow]:
    """Warm up and time one part with all implementations, in interleaved rounds."""
    title = f"{name}: {part}, {ids_BL.shape[0]} sequences"
    common = {
        "model": name,
        "layers": model.config.num_hidden_layers,
        "part": part,
        "batch": ids_BL.shape[0],
        "tokens": ids_BL.numel() if part == TRAIN else ids_BL.shape[0],
    }
    actions: dict[str, Action] = {}
    rows: dict[str, dict[str, Any]] = {}
    for implementation in config.implementations:
        say(f"{title}, preparing {implementation}")
        action, found = _prepare(part, model, implementation, ids_BL, config)
        if action is not None:
            actions[implementation] = action
        rows[implementation] = {**common, "implementation": implementation, **found}
    baseline = BASELINE if BASELINE in actions else next(iter(actions), None)
    _refuse_other_losses(actions, rows, baseline)
    if actions:
        say(f"{title}, timing, {config.repeat} rounds")
        samples = interleave(actions, rounds=config.repeat, clock=clock_for(model.device))
        times = timings(samples)
        tell_times(say, title, times)
        for implementation, time in times.items():
            steps = config.new_tokens if part == DECODE else 1
            rows[implementation] |= _times(time, steps, common["tokens"])
    for row in rows.values():
        base = None if baseline is None else rows[baseline].get("ms")
        if base is not None and row.get("ms") is not None:
            row |= {"ratio": base / row["ms"], "baseline": baseline}
        yield HfRow(**row)


def _refuse_other_losses(
    actions: dict[str, Action], rows: dict[str, dict[str, Any]], baseline: str | None
) -> None:
    """Remove the actions whose loss is not the baseline's, and give the reason in their rows."""
    for implementation in list(actions):
        row = rows[implementation]
        row["refused"] = _other_loss(row["loss"], rows[str(baseline)]["loss"])
        if row["refused"] is not None:
            del actions[implementation]


def _prepare(
    part: str, model: Any, implementation: str, ids_BL: Tensor, config: HfBenchConfig
) -> tuple[Action | None, dict[str, Any]]:
    """Warm an action up; return it with its memory and loss, or None with the failure."""
    try:
        action = _action(part, model, implementation, ids_BL, config)
        memory = warmed_memory(action, model.device, calls=_WARM_UP)
    except Exception as failure:  # the failure of one implementation must not end the run
        return None, {"refused": typed_line(failure)}
    return action, {
        "memory_mib": in_mib(memory),
        "loss": float(action.loss) if isinstance(action, TrainStep) else None,
    }


def _action(
    part: str, model: Any, implementation: str, ids_BL: Tensor, config: HfBenchConfig
) -> TrainStep | Decode:
    if part == TRAIN:
        return TrainStep(model, implementation, ids_BL)
    from transformers import GenerationConfig

    options = GenerationConfig(
        max_new_tokens=config.new_tokens,
        min_new_tokens=config.new_tokens,
        do_sample=False,
        cache_implementation="static",
        disable_compile=not config.compile,
        pad_token_id=0,
        eos_token_id=None,
    )
    return Decode(model, implementation, ids_BL, options)


def _other_loss(loss: float | None, wanted: float | None) -> str | None:
    """Return a reason to refuse an implementation whose loss is not that of the baseline."""
    if loss is None or wanted is None or abs(loss - wanted) <= _LOSS_TOLERANCE * abs(wanted):
        return None
    return f"its loss is {loss:.4f} and the baseline's {wanted:.4f}"


def _times(time: Timing, steps: int, tokens: int) -> dict[str, float]:
    median, low, high = (value / steps for value in time)
    return {
        "ms": median,
        "ms_low": low,
        "ms_high": high,
        "tokens_per_second": 1e3 * tokens / median,
    }
