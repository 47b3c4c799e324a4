"""The folder of what is measured or compiled on this machine and can be made again."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return $XDG_CACHE_HOME/acmoe/NAME, by default ~/.cache/acmoe/NAME, which need not exist.

    Without a home folder "~" stays. Nothing is kept then, least of all in a folder named "~": the
    path returned can be neither read nor written.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.devnull if base.startswith("~") else base) / "acmoe" / name
