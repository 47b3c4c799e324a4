"""Small runs for a laptop, on the source code of Python's standard library; no download.

Recipes of one model differ in the router alone: they have the same seed, initial weights and data.
"""

from collections.abc import Callable
from dataclasses import replace

from acmoe.config.routing import RouterConfig
from acmoe.config.text.language import LANGUAGE_MODELS, language_router
from acmoe.config.text.train import DataConfig, RunConfig


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
    "glam-nano": glam_nano,
    "glam-nano-acmoe": glam_nano_acmoe,
}
