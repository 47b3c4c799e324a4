"""Small runs for a laptop, on the source code of Python's standard library; no download.

Recipes of one model differ in the router alone: they have the same seed, initial weights and data.
Those named after the published code also differ in initial weights and empty memory.
"""

from collections.abc import Callable
from dataclasses import replace

from acmoe.config.routing import RouterConfig
from acmoe.config.text.language import LANGUAGE_MODELS, language_router
from acmoe.config.text.train import DataConfig, RunConfig
from acmoe.recipes.language import published_control


def nano_run(model: str, router: str | RouterConfig) -> RunConfig:
    """Return a run of 2,000 updates of 1,024 bytes, which takes minutes on a CPU.

    Validation reads only 50,000 bytes to save time.
    """
    config = LANGUAGE_MODELS[model].config
    return RunConfig(
        model=replace(config, router=language_router(router, config)),
        data=DataConfig(name="stdlib"),
        steps=2000,
        batch=8,
        lr=3e-3,
        warmup=100,
        schedule="cosine",
        min_lr=3e-4,
        clip=1.0,
        eval_every=200,
        eval_tokens=50_000,
        checkpoint_every=200,
    )


def switch_nano() -> RunConfig:
    """Switch-nano, SMoE, bytes of Python's standard library (not in the paper).

    Ours: 2.9676 +- 0.0700 bits per byte after 300 updates (n = 5, studies/). Minutes on two
    CPU cores.
    """
    return nano_run("switch-nano", "smoe")


def switch_nano_acmoe() -> RunConfig:
    """Switch-nano, ACMoE with running statistics, the same bytes (not in the paper).

    Ours: 2.9645 +- 0.0611 bits per byte after 300 updates with the statistics of the batch (n = 5,
    studies/). Minutes on two CPU cores.
    """
    return nano_run("switch-nano", "adaptive")


def switch_nano_published() -> RunConfig:
    """Switch-nano in the layout of the published code, the same bytes (not in the paper).

    Ours: not measured yet. Layers 1 and 2 have linear gates with bias, layers 3 and 4 the published
    AC gate; see `switch-enwik8-published`. Minutes on two CPU cores.
    """
    model = "switch-nano-published"
    return nano_run(model, LANGUAGE_MODELS[model].config.router)


def switch_nano_published_control() -> RunConfig:
    """Switch-nano in the layout of the published code with M = I, a control (not in the paper).

    Ours: not measured yet. See `switch-enwik8-published-control`. Minutes on two CPU cores.
    """
    run = switch_nano_published()
    return replace(run, model=published_control(run.model))


def glam_nano() -> RunConfig:
    """GLaM-nano, SMoE, bytes of Python's standard library (not in the paper).

    Ours: not measured yet. Minutes on two CPU cores.
    """
    return nano_run("glam-nano", "smoe")


def glam_nano_acmoe() -> RunConfig:
    """GLaM-nano, ACMoE with running statistics, the same bytes (not in the paper).

    Ours: not measured yet. Minutes on two CPU cores.
    """
    return nano_run("glam-nano", "adaptive")


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "switch-nano": switch_nano,
    "switch-nano-acmoe": switch_nano_acmoe,
    "switch-nano-published": switch_nano_published,
    "switch-nano-published-control": switch_nano_published_control,
    "glam-nano": glam_nano,
    "glam-nano-acmoe": glam_nano_acmoe,
}
