"""Access to the HuggingFace hub through its `datasets` package, an optional dependency."""

import importlib
from typing import Any

from acmoe.errors import UserError, first_line


def hub_library() -> Any:
    """Import and return the `datasets` package."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            "the HuggingFace hub needs the data extra: pip install 'acmoe[data]'"
        ) from error


def load_from_hub(name: str, *arguments: Any, fix: str, **options: Any) -> Any:
    """Call `datasets.load_dataset`; `fix` ends the error message."""
    library = hub_library()
    try:
        return library.load_dataset(name, *arguments, **options)
    except Exception as error:  # the library and its HTTP client raise many unrelated types
        raise UserError(
            f"could not fetch {name} from the HuggingFace hub ({first_line(error)}); {fix}"
        ) from error
