"""Options of several commands that read a run: their texts on help pages, and what they do."""

import logging
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from acmoe.errors import check

if TYPE_CHECKING:
    from acmoe.config.images.attack import AttackConfig

Threads = Annotated[
    int | None,
    tyro.conf.arg(
        help="Number of CPU threads. If not given: OMP_NUM_THREADS, else 1 for small models and "
        "torch's default for others."
    ),
]
Which = Annotated[
    Literal["best", "last"],
    tyro.conf.arg(help="The checkpoint to load: the best by validation, or the last."),
]
Ema = Annotated[
    bool,
    tyro.conf.arg(
        help="Use the moving average of the weights, which a run trained with ema=0.99996 keeps."
    ),
]
# Options of image classifiers.
ImageBatch = Annotated[int, tyro.conf.arg(help="Images per forward pass.")]
ImageStatistics = Annotated[
    Literal["batch", "running", "sequence"] | None,
    tyro.conf.arg(help="Statistics mode of the adaptive routers; the model's own if not given."),
]
ImageCapacity = Annotated[
    str | None,
    tyro.conf.arg(
        help="Images: capacity factor of the experts. none drops no token, so the images of a "
        "batch do not compete for experts; a number such as the paper's 1.25 limits the tokens of "
        "each expert; model takes the factor of the training. none if not given."
    ),
]
Dropless = Annotated[bool, tyro.conf.arg(help="Old spelling of --capacity none.")]
AttackSteps = Annotated[
    int | None, tyro.conf.arg(help="Number of steps of pgd and spsa; 20 if not given.")
]
AttackDirections = Annotated[
    int | None,
    tyro.conf.arg(
        help="Number of random directions per gradient estimate of spsa; 128 if not given."
    ),
]


def run_threads(requested: int | None, folder: Path, device: str) -> None:
    """Set the threads of a command that reads the run in `folder`; log the choice."""
    from acmoe.config.images.train import VISION_RUNS
    from acmoe.evaluate.run import open_image_run, open_run, run_kind
    from acmoe.train.threads import choose_threads, use_threads

    opened = open_image_run if run_kind(folder) in VISION_RUNS else open_run
    threads = choose_threads(requested, opened(folder).config.model, device=device)
    use_threads(threads)
    logging.getLogger("acmoe").info(threads.message)


def capacity_option(capacity: str | None, dropless: bool) -> str | None:
    """Return the text of --capacity, or `none` where --dropless is given in its place."""
    if not dropless:
        return capacity
    check(
        capacity in (None, "none"),
        f"--dropless beside --capacity {capacity}: it means --capacity none; leave one of them out",
    )
    warnings.warn("--dropless is now --capacity none, the default", FutureWarning, stacklevel=2)
    return "none"


def check_contaminate(rate: float | None) -> None:
    """Raise a UserError unless --contaminate is a fraction, or not given."""
    check(
        rate is None or 0 < rate < 1,
        f"--contaminate {rate}; it must lie between 0 and 1: the fraction of words or bytes to "
        "replace, such as 0.025",
    )


def set_attack_options(config: "AttackConfig", **options: Any) -> "AttackConfig":
    """Set the options of an attack that are given, not None; raise for one that it does not have.

    >>> # set_attack_options(attack_config("spsa"), steps=4, directions=None)
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    known = {field.name for field in fields(config.attack)}
    for name, value in chosen.items():
        option = name.replace("_", "-")
        check(name in known, f"{config.attack.name} takes no --{option} ({value}); leave it out")
    return replace(config, attack=replace(config.attack, **chosen))
