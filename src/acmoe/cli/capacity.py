"""The option --capacity of the commands that score images, and its old spelling."""

import warnings


def capacity_option(capacity: str | None, dropless: bool) -> str | None:
    """Return the text of --capacity, or `none` where --dropless is given in its place."""
    if not dropless:
        return capacity
    warnings.warn("--dropless is now --capacity none, the default", FutureWarning, stacklevel=2)
    return "none"
