"""Looks of experts and of routers that every common form of colour blindness tells apart."""

from __future__ import annotations

from typing import NamedTuple

# Okabe and Ito's eight, black last because it is the heaviest on a page.
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
# Found by greedy search: each as far as possible, in OKLab and under the worst of four kinds of
# sight, from all before it and from white. No two are closer than the closest two of the eight.
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
# Thirteen and sixteen have no common divisor: pairs of mark and colour repeat after 208 experts.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h", "d")


class RouterLook(NamedTuple):
    """A router in bars and lines; any one of the channels is enough."""

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
    """#RRGGBB as three numbers in [0, 1]."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue


def faded(colour: str, strength: float) -> str:
    """`colour` on white paper at this strength, 1 the colour itself."""
    mixed = (round(255 * (1 - strength * (1 - part))) for part in rgb(colour))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def luminance(colour: str) -> float:
    """Relative luminance of WCAG: 0 black, 1 white."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(colour: str) -> str:
    """Black or white, whichever has more contrast: at least 4.5 to 1 on any colour."""
    # The two contrasts, (L + 0.05) / 0.05 and 1.05 / (L + 0.05), are equal at L = 0.179.
    return "#000000" if luminance(colour) > 0.179 else "#FFFFFF"
