"""Put a row of the evidence page into words: its interval, its pairs, its effect."""

from collections.abc import Sequence

from acmoe.lab.study.evidence.claims import Claim
from acmoe.lab.study.evidence.rows import Row


def where_text(row: Row) -> str:
    """Return our data, where the claim's title names the paper's, and the setting."""
    return f"{row.claim.data}: {row.setting}" if row.claim.data else row.setting


def interval_text(row: Row) -> str:
    """Return the mean difference and its interval, or say that there is none."""
    ours = row.ours
    if ours is None:
        return "no figures"
    if ours.low is None or ours.high is None:
        return f"{signed(ours.mean, row)}, {_pairs_without_interval(row)}, no interval"
    return f"{signed(ours.mean, row)} [{ours.low:+.2f}, {ours.high:+.2f}]"


def _pairs_without_interval(row: Row) -> str:
    """Return why no spread is known; two pairs, which have a mean alone, are shown one by one."""
    if row.pairs == 1:
        return "one pair"
    if row.pairs == 2:
        return f"two pairs ({', '.join(f'{value:+.2f}' for value in row.single)})"
    return "equal pairs"


def effect_text(row: Row) -> str:
    """Return the paper's effect; "none" for an idea of our own."""
    effect = row.claim.effect
    return "none" if effect is None else signed(effect, row)


def pairs_text(row: Row) -> str:
    """Return the number of pairs, as "2 of 4" where more were declared."""
    return f"{row.pairs} of {row.claim.declared}" if row.interim else str(row.pairs)


def counted_text(row: Row) -> str:
    """Return the number of pairs for a line of a list."""
    return f"{pairs_text(row)} declared pairs" if row.interim else f"n = {row.pairs}"


def diverged_text(row: Row) -> str:
    """Return how many runs of each condition diverged; empty where none did."""
    if not any(row.diverged):
        return ""
    counts = zip(row.diverged, (row.claim.condition, row.claim.baseline), strict=True)
    return f"runs that diverged: {', '.join(f'{n} {name}' for n, name in counts)}"


def command_text(claim: Claim, settings: Sequence[str]) -> str:
    """Return the command that makes the declared runs of a claim which the records do not have."""
    names = " ".join(f'"{setting}"' for setting in settings)
    pairs = range(claim.declared or 0)  # no number was declared: the study's own seeds
    seeds = " ".join(["", "--seeds", *map(str, pairs)]) if pairs else ""
    only = f"--only {claim.baseline} {claim.condition}"
    return f"acmoe study {claim.study} --data DATA --settings {names} {only}{seeds} --published"


def share_text(row: Row) -> str:
    """Return the share of the paper's training, in percent."""
    share = row.share
    if share is None:
        return ""
    return f"{100 * share:.1f}%" if share >= 0.001 else f"{100 * share:.2g}%"


def length_text(row: Row) -> str:
    """Return the length of our training, in millions of tokens."""
    return "" if row.share is None else f"{row.share * row.claim.length / 1e6:,.0f} million tokens"


def signed(value: float, row: Row) -> str:
    """Return a difference with its sign and unit."""
    return f"{value:+.2f}{unit(row)}"


def unit(row: Row) -> str:
    """Return the unit of the row's differences."""
    return "%" if row.claim.unit == "percent" else " points"
