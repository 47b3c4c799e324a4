"""How large the cells of a study are: the same for all of a setting, and written into each."""

from dataclasses import dataclass, fields

from acmoe.errors import check


@dataclass(frozen=True, kw_only=True)
class Size:
    """None is the study's own choice."""

    steps: int | None = None  # optimizer updates
    batch: int | None = None  # streams, or images, of an update
    tokens: int | None = None  # of each text scored
    megabytes: float | None = None  # of the byte corpus
    parts: int | None = None  # files of the word corpus' training text
    vocabulary: int | None = None  # words kept
    images: int | None = None  # attacked by FGSM and PGD
    spsa_images: int | None = None  # attacked by SPSA, which takes thousands of passes an image
    brief: bool = False  # neither finetuning nor attacks
    overrides: tuple[str, ...] = ()  # key=value of every cell's config
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
        """As options of the command; empty where all is the study's own choice."""
        given = [(name, getattr(self, name)) for name in _NUMBERS]
        options = [f"--{_option(name)} {value:g}" for name, value in given if value is not None]
        return " ".join([*options, *(["--brief"] if self.brief else []), *self.overrides])


_NUMBERS = [
    field.name for field in fields(Size) if field.name not in ("brief", "overrides", "device")
]


def _option(name: str) -> str:
    return name.replace("_", "-")
