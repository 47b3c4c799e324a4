"""Options of several commands: --threads, --capacity, --contaminate, attacks' and unread ones."""

import logging
import warnings
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import tyro

from acmoe.errors import check

if TYPE_CHECKING:
    from acmoe.config.images.attack import AttackConfig


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


def check_read(command: Any, read: Collection[str], when: str) -> None:
    """Raise a UserError if an option is given that is not one of `read`.

    `when` says what the options are read for, such as "with --summarise". A field that has its
    default counts as not given.
    """
    hints = get_type_hints(type(command), include_extras=True)
    for field in fields(command):
        value = getattr(command, field.name)
        positional = tyro.conf.Positional in getattr(hints[field.name], "__metadata__", ())
        option = "" if positional else f"--{field.name.replace('_', '-')} "
        check(
            field.name in read or value == field.default,
            f"{option}{_words(value)}".strip() + f" has no effect {when}; leave it out",
        )


def _words(value: object) -> str:
    """Return a value as on the command line; a flag has none."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if isinstance(value, bool) else str(value)
