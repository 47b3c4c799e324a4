"""Colours and markers of experts and routers, distinct under common forms of colour blindness."""

from __future__ import annotations

from typing import NamedTuple

# The eight colours of Okabe and Ito, black last because it dominates a page.
OKABE_ITO = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#000000",
)
ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK, BLACK = OKABE_ITO
# Found by greedy search: each colour is as far as possible from all before it and from white. The
# distance is in OKLab, the smallest over four kinds of colour vision. No two of these colours are
# closer than the closest two of the eight.
_MORE = (
    "#78000F",
    "#003C78",
    "#695A5A",
    "#B4C3A5",
    "#A569FF",
    "#6900F0",
    "#B41E0F",
    "#00E1FF",
)
COLOURS = OKABE_ITO + _MORE
# 13 markers and 16 colours have no common divisor, so pairs of them repeat after 208 experts only.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h", "d")


class RouterLook(NamedTuple):
    """Style of one router's bars and lines. Each of the four attributes alone identifies it."""

    colour: str
    dashes: str | tuple[int, tuple[int, ...]]
    marker: str
    hatch: str


ROUTER_LOOKS = (
    RouterLook("#0072B2", "-", "o", ""),
    RouterLook("#E69F00", "--", "s", "///"),
    RouterLook("#009E73", "-.", "^", "..."),
    RouterLook("#D55E00", ":", "D", "xxx"),
    RouterLook("#CC79A7", (0, (6, 1, 1, 1, 1, 1)), "v", "---"),
    RouterLook("#000000", (0, (1, 3)), "X", "++"),
)


def expert_colour(expert: int) -> str:
    return COLOURS[expert % len(COLOURS)]


def expert_marker(expert: int) -> str:
    return MARKERS[expert % len(MARKERS)]


def rgb(colour: str) -> tuple[float, float, float]:
    """Convert #RRGGBB to three numbers in [0, 1]."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue


def faded(colour: str, strength: float) -> str:
    """Mix `colour` with white; a `strength` of 1 returns the colour itself."""
    mixed = (round(255 * (1 - strength * (1 - part))) for part in rgb(colour))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG defines it: 0 is black, 1 is white."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(colour: str) -> str:
    """Return black or white, whichever has more contrast: at least 4.5 to 1 on any colour."""
    # The two contrasts, (L + 0.05) / 0.05 and 1.05 / (L + 0.05), are equal at L = 0.179.
    return "#000000" if luminance(colour) > 0.179 else "#FFFFFF"
