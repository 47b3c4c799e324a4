"""Rewrite tokens with characters that the figures' monospaced font shows in one column each."""

from __future__ import annotations

import unicodedata
from functools import cache

FONT = "DejaVu Sans Mono"  # comes with matplotlib, so it is the same on every machine
ADVANCE = 1233 / 2048  # width of a character of this font, in ems

_SIGNS = {"\n": "\u23ce", "\t": "\u21e5"}
_NOTHING = "\u2205"


def visible(token: str | bytes) -> str:
    """Return the token with every invisible character replaced by a visible one.

    A newline becomes a return sign and a tab an arrow. Control characters, bytes above 127,
    combining marks and characters that the font lacks become Python escapes. An empty token is ∅.
    """
    if isinstance(token, bytes):
        shown = "".join(_shown(chr(byte)) if byte < 128 else f"\\x{byte:02x}" for byte in token)
    else:
        shown = "".join(map(_shown, token))
    return shown or _NOTHING


def ends_line(token: str | bytes) -> bool:
    return token[-1:] in ("\n", b"\n")


def _shown(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if character == " " or (character.isprintable() and _has_a_column(character)):
        return character
    return character.encode("unicode_escape").decode("ascii")


def _has_a_column(character: str) -> bool:
    return not unicodedata.combining(character) and ord(character) in _glyphs()


@cache
def _glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont(FONT)).get_charmap())
