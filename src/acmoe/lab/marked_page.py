"""Replace the part of a documentation page between two markers, and leave the rest alone."""

from acmoe.errors import check


def replace_between(text: str, begin: str, end: str, content: str, *, page: str) -> str:
    """Return the text with `content` in place of the text between the markers."""
    once = text.count(begin) == 1 and text.count(end) == 1 and text.index(begin) < text.index(end)
    check(once, f"{page} must hold {begin} and, below it, {end}, once each; put them there")
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"
