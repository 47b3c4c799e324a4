"""Bytes and words: the paper's language models, shortened, over its routers and their controls."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from acmoe.config.routing import AdaptiveConfig, RouterConfig
from acmoe.config.text.finetune import FinetuneConfig
from acmoe.config.text.language import LANGUAGE_MODELS, LanguageConfig, language_router
from acmoe.config.text.train import DataConfig, RunConfig, override_run
from acmoe.lab.study.cell import Cell, TextTests
from acmoe.lab.study.crossed import Conditions, crossed
from acmoe.lab.study.materials import Materials, Text
from acmoe.lab.study.size import Size

PAPER = AdaptiveConfig.preset("paper")
PUBLISHED = AdaptiveConfig.preset("reference-lm")

BYTE_STEPS, WORD_STEPS = 1000, 1500
MEGABYTES, PARTS, VOCABULARY = 30.0, 1, 50_000
TEST_TOKENS = 1_000_000  # of each text scored at the end
VALID_TOKENS = 262_144  # of each validation on the way

CONDITIONS: dict[str, str | RouterConfig] = {
    "smoe": "smoe",
    "control": PUBLISHED.base,
    "adaptive-previous": PAPER,
    "adaptive-current": replace(PAPER, statistics_of="current"),
    "reference-lm": PUBLISHED,
    "metric": "metric",
}

# The paper's block is post-norm; its text has the balance loss, its code does not, and begins with
# experts too small.
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

# Model and dropout; the second is finetuned, since little dropout suits short runs.
WORD_SETTINGS = (("switch-small", 0.7), ("switch-small", 0.1), ("glam-small", 0.1))
FINETUNED = WORD_SETTINGS[1]

# About 1,200 updates in all, at rates that reach an answer in them; the paper's 50 epochs of
# Banking-77 at 1e-5 are `acmoe finetune`'s default.
TASKS = (
    FinetuneConfig(task="sst2", epochs=1, lr=1e-3, batch=256, precision="bf16"),
    FinetuneConfig(task="sst5", epochs=3, lr=1e-3, batch=64, precision="bf16"),
    FinetuneConfig(task="banking77", epochs=4, lr=1e-3, batch=64, precision="bf16"),
)


def bytes_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """switch-enwik8 on bytes of Wikipedia, and the beginning of the real EnWik-8 as a check."""
    text, model, tests = byte_parts(materials, size)
    cells = []
    for setting, changes in BYTE_SETTINGS.items():
        cells += text_cells(
            "bytes",
            f"switch-enwik8, {setting}",
            replace(model, **changes),
            CONDITIONS,
            text,
            tests,
            size,
            seeds,
            factors=changes,
        )
    return cells


def byte_parts(materials: Materials, size: Size) -> tuple[Text, LanguageConfig, TextTests]:
    """The corpus, the model that fits it, and what is scored."""
    text = materials.bytes(size.megabytes or MEGABYTES)
    model = replace(LANGUAGE_MODELS["switch-enwik8"].config, vocab_size=text.vocab_size)
    tokens = size.tokens or TEST_TOKENS
    prefix = materials.other_bytes(text, tokens)
    return text, model, TextTests(tokens=tokens, others=(("enwik8", str(prefix)),))


def words_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """The small models on words, WikiText-103's articles as a second test, then three tasks."""
    text, tests = word_parts(materials, size)
    finetuned = tests if size.brief else _with_tasks(materials, tests)
    names = ("smoe", "adaptive-previous", "adaptive-current", "metric")
    conditions = {name: CONDITIONS[name] for name in names}
    cells = []
    for name, dropout in WORD_SETTINGS:
        cells += text_cells(
            "words",
            f"{name}, dropout {dropout}",
            word_model(name, text, dropout),
            conditions,
            text,
            finetuned if (name, dropout) == FINETUNED else tests,
            size,
            seeds,
            factors={"model": name, "dropout": dropout},
        )
    return cells


def word_model(name: str, text: Text, dropout: float) -> LanguageConfig:
    config = LANGUAGE_MODELS[name].config
    return replace(config, vocab_size=text.vocab_size, dropout=dropout)


def word_parts(materials: Materials, size: Size) -> tuple[Text, TextTests]:
    text = materials.words(size.parts or PARTS, size.vocabulary or VOCABULARY)
    other = materials.other_words(text)
    return text, TextTests(tokens=size.tokens, others=(("wikitext103", str(other)),))


def _with_tasks(materials: Materials, tests: TextTests) -> TextTests:
    folder = materials.tasks(tuple(task.task for task in TASKS))
    return replace(tests, tasks=TASKS, task_folder=str(folder))


def text_cells(
    study: str,
    setting: str,
    model: LanguageConfig,
    conditions: Conditions,
    text: Text,
    tests: TextTests,
    size: Size,
    seeds: Sequence[int],
    *,
    factors: Mapping[str, str | int | float],
) -> list[Cell]:
    """A cell for each seed and condition; 24,576 tokens an update unless told otherwise."""
    return crossed(
        study,
        setting,
        conditions,
        seeds,
        lambda router, seed: text_run(model, router, text, size, seed),
        unit="tokens",
        data=text.fingerprint,
        tests=tests,
        factors=factors,
    )


def text_run(
    model: LanguageConfig, router: str | RouterConfig, text: Text, size: Size, seed: int
) -> RunConfig:
    """A short run: the paper's rate, which then falls, and its tokens an update."""
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
