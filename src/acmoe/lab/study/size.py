"""The size of a study's cells: the same for all cells of a setting, and stored in each."""

import copy
from dataclasses import dataclass, fields
from typing import Any

from acmoe.errors import check


@dataclass(frozen=True, kw_only=True)
class Size:
    """Lengths and limits of all cells; None means the study's default."""

    steps: int | None = None  # optimizer updates
    batch: int | None = None  # streams, or images, in an update
    tokens: int | None = None  # scored tokens of each text
    megabytes: float | None = None  # length of the byte corpus
    parts: int | None = None  # number of training files of the word corpus
    vocabulary: int | None = None  # number of words in the vocabulary
    images: int | None = None  # images attacked by FGSM and PGD
    spsa_images: int | None = None  # images attacked by SPSA, which needs thousands of passes each
    brief: bool = False  # no finetuning and no attacks
    overrides: tuple[str, ...] = ()  # key=value overrides of every cell's config
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            check(value is None or value > 0, f"--{_option(name)} {value}; it must be positive")
        for pair in self.overrides:
            check(
                not pair.startswith(("seed=", "device=")),
                f"{pair} cannot be set for all cells; use --seeds or --device",
            )

    @property
    def text(self) -> str:
        """The size as options of the command; empty where all are defaults."""
        given = [(name, getattr(self, name)) for name in _NUMBERS]
        options = [f"--{_option(name)} {value:g}" for name, value in given if value is not None]
        return " ".join([*options, *(["--brief"] if self.brief else []), *self.overrides])

    def adding(self, *overrides: str) -> "Size":
        """Return this size with overrides that come before its own."""
        changed = copy.copy(self)
        object.__setattr__(changed, "overrides", (*overrides, *self.overrides))
        return changed


class WatchedSize(Size):
    """A size that knows which of its options were read, by itself or by a changed copy."""

    def __init__(self, size: Size) -> None:
        vars(self).update(vars(size), reads=set())

    def __getattribute__(self, name: str) -> Any:
        values = object.__getattribute__(self, "__dict__")
        if name in values:
            values["reads"].add(name)
        return object.__getattribute__(self, name)

    def unread(self) -> list[str]:
        """Return the options that were given and that nothing has read, as on the command line."""
        values = object.__getattribute__(self, "__dict__")
        given = {name: values[name] for name in _NUMBERS if values[name] is not None}
        options = {name: f"--{_option(name)} {value:g}" for name, value in given.items()}
        if values["brief"]:
            options["brief"] = "--brief"
        if values["device"] not in ("auto", "cpu"):  # cells that read no device run on the CPU
            options["device"] = f"--device {values['device']}"
        return [text for name, text in options.items() if name not in values["reads"]]


_NUMBERS = [
    field.name for field in fields(Size) if field.name not in ("brief", "overrides", "device")
]


def _option(name: str) -> str:
    return name.replace("_", "-")
