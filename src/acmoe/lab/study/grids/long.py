"""Long runs: the paper's recipes on Wikipedia, an eighth of the paper's tokens or more.

A cell of `long` takes about four minutes of one H200. Cells run one at a time (`--jobs 1`): one
process fills the card. A folder with the compressed texts is all the data they need, no network:

    DATA/enwiki15-bytes/enwiki15.100MB.xz    DATA/enwik8-prefix/enwik8.first4154064.xz
    python -m acmoe study long --data DATA --settings "balance 0.01" --seeds 0 1 --minutes 18

With `--published`, in a clone of the repository, the records join those of studies/records.

The condition `distance`, the router of Theorem A (docs/theory.md), is in "balance 0.01" alone:

    python -m acmoe study long --data DATA --settings "balance 0.01" --only distance --seeds 0

The condition `fade`, in which M returns to the identity in the first half of the training, is in
"balance 0.01" and "balance 0". docs/studies/long.md has its prediction, written before its runs:

    python -m acmoe study long --data DATA --settings "balance 0.01" --only smoe fade --seeds 0

A setting, a condition and a seed choose one cell; `--list` prints the chosen cells in the order in
which they run, seed by seed, so that an interrupted study leaves pairs:

    python -m acmoe study long --data DATA --settings "balance 0" --only smoe --seeds 1 --list
    python -m acmoe study long --data DATA --settings published --only published-control --seeds 0

Text is decompressed and encoded once, into `--work`. Cells save checkpoints: the same command
continues a killed cell if its folder below `--scratch` is still there. The first cell on a new
machine compiles for half a minute to two minutes, later ones for about ten seconds; the folders
TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR keep what was compiled.

`--settings nano` rehearses the same cells on a CPU, on source text of the standard library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from acmoe.config.text.language import LanguageConfig, language_router
from acmoe.config.text.train import DataConfig, RunConfig, override_run
from acmoe.lab.study.cell import Cell, TextTests
from acmoe.lab.study.grids.grid import Conditions, Setting, grid_cells
from acmoe.lab.study.grids.nano import TEXT_STEPS, nano_text_cells
from acmoe.lab.study.grids.text import CONDITIONS, PAPER, VOCABULARY
from acmoe.lab.study.materials import Materials, Text
from acmoe.lab.study.size import Size
from acmoe.lab.variants import variant_of
from acmoe.recipes import recipe, recipes

MEGABYTES, PARTS = 100.0, 4  # the whole corpus of each kind
BYTE_STEPS, CONSTANT_STEPS, WORD_STEPS = 10_000, 16_000, 5_000  # 246, 393 and 123M tokens
TEST_TOKENS, VALID_TOKENS, ROUTING_TOKENS = 1_000_000, 500_000, 65_536
VALIDATIONS, CHECKPOINTS = 10, 4  # numbers in a run
DIVERGED = 0.3  # nats above the best validation loss

ROUTERS: Conditions = {
    name: CONDITIONS[name] for name in ("smoe", "adaptive-previous", "adaptive-current")
}
# The paper's router and statistics, but the nearest expert in M instead of the dot product of
# Eqn. 8: the rule for which Proposition 1 is proved (docs/theory.md, section 5.5).
WITH_DISTANCE: Conditions = {**ROUTERS, "distance": variant_of(PAPER, distance=True)}
# Conditions with a model of their own, by their recipes; a recipe that does not exist is left out.
PUBLISHED = {
    "published": "switch-enwik8-published",
    "published-control": "switch-enwik8-published-control",
}
# As in the trials before this study: one forward pass per update, a falling rate.
FALLING: dict[str, Any] = {"schedule": "cosine", "min_lr": 7e-5}
HALF_RATE: dict[str, Any] = {**FALLING, "lr": 3.5e-4, "min_lr": 3.5e-5}
TWICE_THE_RATE: dict[str, Any] = {**FALLING, "lr": 1.4e-3, "min_lr": 1.4e-4}
# The fastest way to train on a GPU; on a CPU override all three.
FAST: dict[str, Any] = {"split": 1, "precision": "bf16", "compile": True, "graph": True}


@dataclass(frozen=True, kw_only=True)
class LongSetting:
    """Changes of a recipe that all compared conditions share."""

    steps: int
    model: Mapping[str, Any]
    run: Mapping[str, Any]
    warmup: float = 0.1  # share of the updates
    routers: Conditions = field(default_factory=lambda: ROUTERS)
    fades: bool = False  # with the condition `fade`

    def conditions(self, steps: int) -> Conditions:
        """Return the compared routers of a run of `steps` updates."""
        return {**self.routers, **fading(steps)} if self.fades else self.routers


def fading(steps: int) -> Conditions:
    """Return the paper's router with an M that is the identity from half of the updates on."""
    return {"fade": variant_of(PAPER, fade_steps=max(1, steps // 2))}


# "constant" is the paper's own rate after its warm-up of 4,000 updates, and no clipping: there a
# published log of the plain baseline diverges. "rate" settings are for the choice of the rate.
BYTE_SETTINGS = {
    "balance 0.01": LongSetting(
        steps=BYTE_STEPS, model={"balance": 0.01}, run=FALLING, routers=WITH_DISTANCE, fades=True
    ),
    "balance 0": LongSetting(steps=BYTE_STEPS, model={"balance": 0.0}, run=FALLING, fades=True),
    "constant": LongSetting(
        steps=CONSTANT_STEPS, model={"balance": 0.0}, run={"schedule": "constant"}, warmup=0.25
    ),
    "rate 0.00035": LongSetting(
        steps=BYTE_STEPS,
        model={"balance": 0.01},
        run=HALF_RATE,
    ),
    "rate 0.0014": LongSetting(steps=BYTE_STEPS, model={"balance": 0.01}, run=TWICE_THE_RATE),
}

# Models, and changes of the model and of the run. Dropout 0.7 is that of the published scripts, for
# 983M tokens.
WORD_SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "switch-small, dropout 0.7": ("switch-small", {}, FALLING),
    "switch-small, dropout 0.1": ("switch-small", {"dropout": 0.1}, FALLING),
    "switch-medium": ("switch-medium", {}, FALLING),
    "glam-small": ("glam-small", {}, FALLING),
    "switch-small, rate 0.00035": ("switch-small", {"dropout": 0.1}, HALF_RATE),
    "switch-small, rate 0.0014": ("switch-small", {"dropout": 0.1}, TWICE_THE_RATE),
}
# Settings of each study that differ in the learning rate alone.
BYTE_RATES = {
    "switch-enwik8, rate 0.00035": 3.5e-4,
    "switch-enwik8, balance 0.01": 7e-4,
    "switch-enwik8, rate 0.0014": 1.4e-3,
}
WORD_RATES = {
    "switch-small, rate 0.00035": 3.5e-4,
    "switch-small, dropout 0.1": 7e-4,
    "switch-small, rate 0.0014": 1.4e-3,
}


def byte_setting(name: str) -> str:
    """Return the full name of a setting of the study on bytes."""
    return f"switch-enwik8, {name}"


def byte_settings() -> tuple[str, ...]:
    """Return the full names of all settings of the study on bytes."""
    published = ("published",) if published_conditions() else ()
    return tuple(map(byte_setting, (*BYTE_SETTINGS, *published)))


def long_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return cells of switch-enwik8 on bytes of Wikipedia, also tested on the start of EnWik-8."""
    text = materials.bytes(size.megabytes or MEGABYTES)
    tokens = size.tokens or TEST_TOKENS
    others = (("enwik8", str(materials.other_bytes(text, tokens))),)
    tests = long_tests(tokens, rates=(0.025,), others=others)
    cells = []
    for name, setting in BYTE_SETTINGS.items():
        described = _described("long", byte_setting(name), text, tests, setting.model)
        cells += grid_cells(
            described,
            setting.conditions(size.steps or setting.steps),
            seeds,
            lambda router, seed, setting=setting: long_run(  # type: ignore[misc]
                recipe("switch-enwik8"), setting, text, size, seed, router=router
            ),
        )
    return [*cells, *_published_cells(text, tests, size, seeds)]


def published_conditions() -> dict[str, str]:
    """Return the recipes of the published model and of its control, by condition."""
    return PUBLISHED if set(PUBLISHED.values()) <= recipes().keys() else {}


def _published_cells(text: Text, tests: TextTests, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return cells of the published model, which differs from the paper's in more than a router."""
    setting = LongSetting(steps=BYTE_STEPS, model={}, run=FALLING)
    return grid_cells(
        _described("long", byte_setting("published"), text, tests, {}),
        published_conditions(),
        seeds,
        lambda name, seed: long_run(recipe(str(name)), setting, text, size, seed),
    )


def long_words_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return cells of the paper's models of words, also tested on WikiText-103's validation."""
    text = materials.words(size.parts or PARTS, size.vocabulary or VOCABULARY)
    others = (("wikitext103", str(materials.other_words(text))),)
    tests = long_tests(size.tokens, rates=(0.05,), others=others)
    cells = []
    for name, (model, changes, run) in WORD_SETTINGS.items():
        setting = LongSetting(steps=WORD_STEPS, model=changes, run=run)
        cells += grid_cells(
            _described("long-words", name, text, tests, {"model": model, **changes}),
            ROUTERS,
            seeds,
            lambda router, seed, setting=setting, model=model: long_run(  # type: ignore[misc]
                recipe(model), setting, text, size, seed, router=router
            ),
        )
    return cells


def nano_long(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return cells of switch-nano that save, validate and measure as the long ones do."""
    conditions = {**WITH_DISTANCE, **fading(size.steps or TEXT_STEPS)}
    cells = nano_text_cells("long", conditions, materials, size, seeds)
    tests = cells[0].tests
    assert isinstance(tests, TextTests)
    tests = replace(tests, divergence=DIVERGED, rates=(0.025,), routing_tokens=4096)
    return [replace(cell, config=_saving(cell.config), tests=tests) for cell in cells]


def _described(
    study: str, name: str, text: Text, tests: TextTests, factors: Mapping[str, Any]
) -> Setting:
    return Setting(
        study=study, name=name, unit="tokens", data=text.fingerprint, tests=tests, factors=factors
    )


def long_tests(
    tokens: int | None, *, rates: tuple[float, ...], others: tuple[tuple[str, str], ...]
) -> TextTests:
    """Return the tests of a long run, with routing measured during training."""
    return TextTests(
        tokens=tokens,
        rates=rates,
        others=others,
        divergence=DIVERGED,
        routing_tokens=min(ROUTING_TOKENS, tokens or ROUTING_TOKENS),
    )


def long_run(
    run: Any,
    setting: LongSetting,
    text: Text,
    size: Size,
    seed: int,
    *,
    router: Any = None,
) -> RunConfig:
    """Return a recipe's run on another corpus, for the setting's number of updates.

    `router` replaces the recipe's own.
    """
    assert isinstance(run, RunConfig)
    model = _model(run.model, text, setting.model, router)
    steps = size.steps or setting.steps
    config = replace(
        run,
        model=model,
        data=DataConfig(name=text.name, folder=str(text.folder)),
        steps=steps,
        batch=size.batch or run.batch,
        seed=seed,
        log_every=max(1, min(50, steps // 10)),
        eval_every=max(1, steps // VALIDATIONS),
        eval_batch=32,
        eval_tokens=VALID_TOKENS,
        warmup=int(setting.warmup * steps),
        device=size.device,
        **FAST,
        **setting.run,
    )
    return override_run(_saving(config), size.overrides)


def _model(
    model: LanguageConfig, text: Text, changes: Mapping[str, Any], router: Any
) -> LanguageConfig:
    model = replace(model, vocab_size=text.vocab_size, **changes)
    return model if router is None else replace(model, router=language_router(router, model))


def _saving(config: RunConfig) -> RunConfig:
    """Save checkpoints during the run, so that a killed cell can continue."""
    return replace(config, checkpoint_every=max(1, config.steps // CHECKPOINTS))
