"""Time whole training steps: forward, backward, Adam, and the update of running statistics.

B streams or images, L tokens of a block.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import cast

import torch
from torch import Tensor, nn

from acmoe.config.overrides import override
from acmoe.config.routing import AdaptiveConfig, RouterConfig, router_config
from acmoe.errors import check, suggest, typed_line
from acmoe.fast.compiled import compile_blocks
from acmoe.fast.memory import StaticMemory
from acmoe.lab.bench.harness.added import added
from acmoe.lab.bench.harness.clock import (
    Action,
    capture,
    clock_for,
    in_mib,
    interleave,
    timing,
    timings,
    warmed_memory,
)
from acmoe.lab.bench.harness.progress import Say, silent, tell_times
from acmoe.lab.bench.harness.results import Report, new_report
from acmoe.models.images.classifier import ImageClassifier
from acmoe.models.registry import create_model, list_models, model_card
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.memory import StreamMemory
from acmoe.runtime import autocast, pick_device, seeded
from acmoe.train.optim import adam

VARIANTS = ("eager", "compile", "graph", "compile+graph")
PAPER_MODELS = ("switch-enwik8", "switch-medium", "glam-medium", "swin-small")
NANO_MODELS = ("switch-nano", "swin-nano")
PAPER_TOKENS = 24_576  # tokens per update in the paper's language models
_IMAGES = 128
_NANO_BATCH = 4
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig:
    """Options of `acmoe bench train`."""

    models: tuple[str, ...] = ()  # empty: those of the paper, or on a CPU the nano ones
    routers: tuple[str, ...] = ("smoe", "adaptive")  # the others are compared with the first
    variants: tuple[str, ...] = ()  # empty: all, or on a CPU eager
    batch: int | None = None  # streams or images; None: the paper's 24,576 tokens, or 128 images
    options: tuple[str, ...] = ()  # key=value settings of the models' configs, such as span=512
    precision: str = "bf16"
    repeat: int = 20
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for variant in self.variants:
            known = ", ".join(VARIANTS)
            check(variant in VARIANTS, f"variant {variant!r} is unknown; choose among {known}")
        for model in self.models:
            meant = suggest(model, list_models())
            check(model in list_models(), f"model {model!r} is unknown; {meant}")
            override(model_card(model).config, self.options)
        check(
            bool(self.models) or not self.options,
            f"options {' '.join(self.options)} are of a model's config; name the models they fit",
        )
        check(
            not any(option.startswith("router") for option in self.options),
            "routers are named by --routers, not by an option router=; leave that out",
        )
        check(len(self.routers) >= 1, "routers is empty; name at least one, such as smoe")
        for router in self.routers:
            router_config(_router(router))  # raises for an unknown name
        check(self.batch is None or self.batch >= 1, f"batch={self.batch}; it must be at least 1")
        check(
            self.precision in ("bf16", "fp32"),
            f"precision={self.precision!r} is unknown; choose bf16 or fp32",
        )
        check(self.repeat >= 2, f"repeat={self.repeat}; quartiles need at least 2 rounds")

    @property
    def kind(self) -> str:
        """Return the kind of the report.

        It names variants and options, since a report replaces one of the same kind and day.
        """
        parts = ["train", *self.variants, *self.options]
        return "-".join(part.replace("+", "-").replace("=", "-") for part in parts)


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """Result of one model, router and variant. `added_percent` is relative to the first router."""

    model: str
    router: str
    variant: str
    refused: str | None = None
    items: str | None = None  # tokens or images
    items_per_step: int | None = None
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    items_per_second: float | None = None
    added_percent: float | None = None
    added_percent_low: float | None = None  # 95% interval of the median
    added_percent_high: float | None = None
    memory_mib: float | None = None  # peak beyond weights and optimizer
    loss: float | None = None


class Step:
    """A training step that uses the same random batch each time. It does not synchronise."""

    def __init__(self, model: nn.Module, batch: int | None, config: TrainBenchConfig) -> None:
        self.model = model.train()
        self.device = pick_device(config.device)
        self.precision = config.precision
        self.optimizer = adam(model, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        for group in self.optimizer.param_groups:
            group["capturable"] = self.device.type == "cuda"
        self.memory: StreamMemory | None = None
        # A preallocated memory, because a captured graph has to read and write the same tensors. A
        # trainer without a graph concatenates memory and segment, which moves as many bytes.
        self.static_memory: StaticMemory | None = None
        self.inputs, self.targets = self._draw(batch, config.seed)
        self.loss = torch.zeros((), device=self.device)
        self._fill_memory()

    def _draw(self, batch: int | None, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        if isinstance(self.model, LanguageModel):
            block, vocab = self.model.config.block, self.model.config.vocab_size
            streams = batch or max(1, PAPER_TOKENS // block)
            tokens_BL = torch.randint(vocab, (streams, block + 1), generator=generator)
            inputs, targets = tokens_BL[:, :-1].contiguous(), tokens_BL[:, 1:].contiguous()
        else:
            shape = cast(ImageClassifier, self.model).config
            images = batch or _IMAGES
            size = (images, shape.channels, shape.image_size, shape.image_size)
            inputs = torch.randn(size, generator=generator)
            targets = torch.randint(shape.num_classes, (images,), generator=generator)
        return inputs.to(self.device), targets.to(self.device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with autocast(self.precision, self.device):  # type: ignore[arg-type]
            if isinstance(self.model, LanguageModel):
                out = self.model(self.inputs, self.targets, memory=self.memory)
            else:
                out = self.model(self.inputs, self.targets)
        (out.loss + out.aux_loss).backward()
        if self.static_memory is not None:
            self.memory = self.static_memory.hold(out.memory)
        self.optimizer.step()
        self.loss.copy_(out.loss.detach())

    @torch.no_grad()
    def _fill_memory(self) -> None:
        """Run forward passes until the memory is full, so that all later steps have one shape."""
        while isinstance(self.model, LanguageModel):
            before = 0 if self.memory is None else self.memory.hidden[0].shape[1]
            with autocast(self.precision, self.device):  # type: ignore[arg-type]
                self.memory = self.model(self.inputs, self.targets, memory=self.memory).memory
            hidden = self.memory.hidden[0]
            if hidden.shape[1] == before:
                post = self.model.config.norm == "post"
                length = self.inputs.shape[1] if post else 0
                self.static_memory = StaticMemory(self.memory, length, hidden.dtype)
                self.memory = self.static_memory.hold(self.memory)
                return


def bench_train(config: TrainBenchConfig, *, command: str = "", say: Say = silent) -> Report:
    device = pick_device(config.device)
    models = config.models or (PAPER_MODELS if device.type == "cuda" else NANO_MODELS)
    rows = [row for name in models for row in measure_model(name, config, device, say)]
    return new_report(config.kind, device, command, config, [asdict(row) for row in rows])


def measure_model(
    name: str, config: TrainBenchConfig, device: torch.device, say: Say = silent
) -> Iterator[TrainRow]:
    """Time every router and variant of a model, in interleaved rounds."""
    variants = config.variants or (VARIANTS if device.type == "cuda" else ("eager",))
    if device.type == "cuda":
        torch.compiler.reset()  # the compiled graphs of one model do not serve the next
    steps: dict[str, Step] = {}
    actions: dict[str, Action] = {}
    memory: dict[str, int | None] = {}
    for variant in variants:
        for router in config.routers:
            key = f"{router}/{variant}"
            say(f"{name}: preparing {router}, {variant}")
            try:
                steps[key], actions[key], memory[key] = prepare(name, router, variant, config)
            except Exception as failure:  # the failure of one variant must not end the run
                yield TrainRow(
                    model=name, router=router, variant=variant, refused=typed_line(failure)
                )
    if not actions:
        return
    say(f"{name}: timing, {config.repeat} rounds")
    samples = interleave(actions, rounds=config.repeat, clock=clock_for(device))
    tell_times(say, name, timings(samples))
    for key in actions:
        label = ", ".join((name, *config.options))
        yield _row(label, key, steps[key], samples, memory[key], config.routers[0])


def prepare(
    name: str, router: str, variant: str, config: TrainBenchConfig
) -> tuple[Step, Action, int | None]:
    """Build a model and warm up its step; return the step, the action to time, and its memory.

    Every router starts from the same seed.
    """
    device = pick_device(config.device)
    check(
        variant == "eager" or device.type == "cuda",
        f"variant {variant} is measured on CUDA, not {device.type}; use eager",
    )
    given = model_card(name).config
    wanted = override(given, config.options)
    changed = {
        field.name: value
        for field in fields(wanted)
        if (value := getattr(wanted, field.name)) != getattr(given, field.name)
    }
    with seeded(config.seed, device), torch.device(device):
        model = create_model(name, router=_router(router), **changed)
    batch = config.batch or (_NANO_BATCH if name.endswith("-nano") else None)
    step = Step(model, batch, config)
    if "compile" in variant:
        compile_blocks(model)
    memory = warmed_memory(step, device, calls=_WARM_UP)
    action = capture(step) if "graph" in variant else step
    action()
    check(
        bool(step.loss.isfinite()),
        f"the loss is {float(step.loss)} after {_WARM_UP + 2} steps; try --precision fp32",
    )
    return step, action, memory


def _router(name: str) -> str | RouterConfig:
    return AdaptiveConfig.preset("paper") if name == "paper" else name


def _row(
    name: str,
    key: str,
    step: Step,
    samples: dict[str, list[float]],
    memory: int | None,
    first: str,
) -> TrainRow:
    router, variant = key.split("/")
    time, base = timing(samples[key]), samples.get(f"{first}/{variant}")
    language = isinstance(step.model, LanguageModel)
    items = step.inputs.numel() if language else len(step.inputs)
    price = None if router == first or base is None else added(samples[key], base)
    return TrainRow(
        model=name,
        router=router,
        variant=variant,
        items="tokens" if language else "images",
        items_per_step=items,
        ms=time.median,
        ms_low=time.low,
        ms_high=time.high,
        items_per_second=1e3 * items / time.median,
        added_percent=price and price.percent,
        added_percent_low=price and price.low_percent,
        added_percent_high=price and price.high_percent,
        memory_mib=in_mib(memory),
        loss=float(step.loss),
    )
