"""Bytes and words: shortened runs of the paper's language models, with its routers and controls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from acmoe.config.routing import AdaptiveConfig, RouterConfig
from acmoe.config.text.finetune import FinetuneConfig
from acmoe.config.text.language import LANGUAGE_MODELS, LanguageConfig, language_router
from acmoe.config.text.train import DataConfig, RunConfig, override_run
from acmoe.lab.study.cell import Cell, TextTests
from acmoe.lab.study.grids.grid import Conditions, Setting, as_recorded, grid_cells
from acmoe.lab.study.materials import Materials, Text
from acmoe.lab.study.size import Size

PAPER = AdaptiveConfig.preset("paper")
PUBLISHED = as_recorded("reference-lm")

BYTE_STEPS, WORD_STEPS = 1000, 1500
MEGABYTES, PARTS, VOCABULARY = 30.0, 1, 50_000
TEST_TOKENS = 1_000_000  # scored tokens of each test text
VALID_TOKENS = 262_144  # tokens of each validation during training

CONDITIONS: dict[str, str | RouterConfig] = {
    "smoe": "smoe",
    "control": PUBLISHED.base,
    "adaptive-previous": PAPER,
    "adaptive-current": replace(PAPER, statistics_of="current"),
    "reference-lm": PUBLISHED,
    "metric": "metric",
}

# The paper's blocks are post-norm. The paper describes a balance loss, its published code has none,
# and the code initialises the experts with too small weights.
BYTE_SETTINGS: dict[str, dict[str, Any]] = {
    "pre-norm, balance 0.01": {"norm": "pre", "balance": 0.01},
    "pre-norm, balance 0": {"norm": "pre", "balance": 0.0},
    "post-norm, balance 0.01": {"norm": "post", "balance": 0.01},
    "post-norm, balance 0": {"norm": "post", "balance": 0.0},
    "post-norm, balance 0, published init": {
        "norm": "post",
        "balance": 0.0,
        "expert_init": "published",
    },
}

# (model, dropout). The second is finetuned: short runs need little dropout.
WORD_SETTINGS = (("switch-small", 0.7), ("switch-small", 0.1), ("glam-small", 0.1))
FINETUNED = WORD_SETTINGS[1]

# About 1,200 updates in all, at learning rates high enough for that number. The paper's 50 epochs
# of Banking-77 at 1e-5 are the default of `acmoe finetune`.
TASKS = (
    FinetuneConfig(task="sst2", epochs=1, lr=1e-3, batch=256, precision="bf16"),
    FinetuneConfig(task="sst5", epochs=3, lr=1e-3, batch=64, precision="bf16"),
    FinetuneConfig(task="banking77", epochs=4, lr=1e-3, batch=64, precision="bf16"),
)


def bytes_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return cells of switch-enwik8 on bytes of Wikipedia, also tested on the start of EnWik-8."""
    text, model, tests = byte_parts(materials, size)
    cells = []
    for setting, changes in BYTE_SETTINGS.items():
        described = TextSetting(
            study="bytes",
            name=f"switch-enwik8, {setting}",
            model=replace(model, **changes),
            text=text,
            tests=tests,
            factors=changes,
        )
        cells += text_cells(described, CONDITIONS, size, seeds)
    return cells


def byte_parts(materials: Materials, size: Size) -> tuple[Text, LanguageConfig, TextTests]:
    """Return the corpus, a model of its vocabulary size, and the tests."""
    text = materials.bytes(size.megabytes or MEGABYTES)
    model = replace(LANGUAGE_MODELS["switch-enwik8"].config, vocab_size=text.vocab_size)
    tokens = size.tokens or TEST_TOKENS
    prefix = materials.other_bytes(text, tokens)
    return text, model, TextTests(tokens=tokens, others=(("enwik8", str(prefix)),))


def word_setting(name: str, dropout: float) -> str:
    """Return the name of a setting of the study on words."""
    return f"{name}, dropout {dropout}"


def word_cells(
    name: str, dropout: float, materials: Materials, size: Size, seeds: Sequence[int]
) -> list[Cell]:
    """Return cells of a model of words, tested on WikiText-103 and, in one setting, three tasks."""
    text, tests = word_parts(materials, size)
    if (name, dropout) == FINETUNED and not size.brief:
        tests = _with_tasks(materials, tests)
    setting = TextSetting(
        study="words",
        name=word_setting(name, dropout),
        model=word_model(name, text, dropout),
        text=text,
        tests=tests,
        factors={"model": name, "dropout": dropout},
    )
    compared = ("smoe", "adaptive-previous", "adaptive-current", "metric")
    return text_cells(setting, {one: CONDITIONS[one] for one in compared}, size, seeds)


def word_model(name: str, text: Text, dropout: float) -> LanguageConfig:
    """Return the named model with the vocabulary size of the corpus."""
    config = LANGUAGE_MODELS[name].config
    return replace(config, vocab_size=text.vocab_size, dropout=dropout)


def word_parts(materials: Materials, size: Size) -> tuple[Text, TextTests]:
    """Return the corpus and the tests."""
    text = materials.words(size.parts or PARTS, size.vocabulary or VOCABULARY)
    other = materials.other_words(text)
    return text, TextTests(tokens=size.tokens, others=(("wikitext103", str(other)),))


def _with_tasks(materials: Materials, tests: TextTests) -> TextTests:
    folder = materials.tasks(tuple(task.task for task in TASKS))
    return replace(tests, tasks=TASKS, task_folder=str(folder))


@dataclass(frozen=True, kw_only=True)
class TextSetting:
    """A language model and its corpus, shared by the compared conditions."""

    study: str
    name: str
    model: LanguageConfig
    text: Text
    tests: TextTests
    factors: Mapping[str, str | int | float] = field(default_factory=dict)


def text_cells(
    setting: TextSetting, conditions: Conditions, size: Size, seeds: Sequence[int]
) -> list[Cell]:
    """Return a cell for each seed and condition; an update has 24,576 tokens by default."""
    shared = Setting(
        study=setting.study,
        name=setting.name,
        unit="tokens",
        data=setting.text.fingerprint,
        tests=setting.tests,
        factors=setting.factors,
    )
    return grid_cells(
        shared,
        conditions,
        seeds,
        lambda router, seed: text_run(setting.model, router, setting.text, size, seed),
    )


def text_run(
    model: LanguageConfig, router: str | RouterConfig, text: Text, size: Size, seed: int
) -> RunConfig:
    """Return a short run with the paper's learning rate, which then decays, and its batch size."""
    steps = size.steps or (BYTE_STEPS if text.name == "bytes" else WORD_STEPS)
    config = RunConfig(
        model=replace(model, router=language_router(router, model)),
        data=DataConfig(name=text.name, folder=str(text.folder)),
        steps=steps,
        batch=size.batch or 24_576 // model.block,
        lr=7e-4,
        warmup=steps // 10,
        schedule="cosine",
        min_lr=7e-5,
        precision="bf16",
        seed=seed,
        log_every=max(1, min(50, steps // 10)),
        eval_every=max(1, steps // 10),
        eval_batch=32,
        eval_tokens=VALID_TOKENS,
        checkpoint_every=steps,
        device=size.device,
    )
    return override_run(config, size.overrides)
