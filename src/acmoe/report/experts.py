"""Find how many tokens each expert received, and those to which the router gave it most weight.

N tokens or patches, E experts, K experts per token.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from acmoe.analyze.record import LayerRecord

EXAMPLES, FEWEST_EXAMPLES = 12, 3  # listed per expert, and the fewest where room is scarce
MOST_EXAMPLES = 5000  # on one page; about 60 bytes each
FREQUENT = 6  # the most frequent tokens listed per expert
# Tokens of context before and after an example, by the sample's unit.
CONTEXT = {"bytes": (24, 12), "words": (5, 3), "tokens": (7, 4)}

Example = list[Any]  # [position, value], with a context [position, value, before, token, after]


@dataclass(frozen=True, kw_only=True)
class TextContext:
    """The visible text of all routed tokens, from which examples take their context."""

    tokens: Sequence[str]
    unit: str  # "bytes", "words" or "tokens"

    def around(self, place: int) -> tuple[str, str, str]:
        """Return the text before a token, the token, and the text after it."""
        before, after = CONTEXT[self.unit]
        gap = " " if self.unit == "words" else ""
        return (
            gap.join(self.tokens[max(0, place - before) : place]),
            self.tokens[place],
            gap.join(self.tokens[place + 1 : place + 1 + after]),
        )


class ExpertTokens(TypedDict):
    """The tokens of each expert of a layer."""

    total: int  # N
    got: list[int]  # (E,) tokens that have the expert among their K
    first: list[int]  # (E,) tokens whose first choice is the expert
    ranked: Literal["gate", "affinity"]  # the value by which the examples are ranked
    top: list[list[Example]]  # (E,) the examples of each expert
    frequent: list[list[tuple[str, int]]] | None  # (E,) tokens and counts; None without a context


def examples_per_expert(experts: Sequence[int], share: int) -> int:
    """Return how many examples of each expert fit on a page of `share` runs."""
    room = MOST_EXAMPLES // (share * max(1, sum(experts)))
    return min(EXAMPLES, max(FEWEST_EXAMPLES, room))


def tokens_by_expert(
    layer: LayerRecord, *, examples: int, context: TextContext | None = None, among: int
) -> ExpertTokens:
    """Return, for each expert of a layer, its number of tokens and its examples.

    The counts are over all recorded tokens. The examples are the tokens of highest gate among the
    first `among`. Equal gates are ordered by affinity, then by position. Where the gates are
    unknown, or the same for all tokens, the examples are those of highest affinity.
    """
    chosen_NE = _chosen(layer)
    by_gate = _gates_differ(layer)
    gate_NE, affinity_NE = _gate_of_expert(layer)[:among], layer.affinity[:among].double()
    tops, frequent = [], []
    for expert in range(layer.num_experts):
        place_X = chosen_NE[:among, expert].nonzero()[:, 0]
        place_X = _descending(place_X, affinity_NE[:, expert])
        if by_gate:
            place_X = _descending(place_X, gate_NE[:, expert])
        value_NE = gate_NE if by_gate else affinity_NE
        values_X = value_NE[place_X, expert]
        tops.append(_examples(place_X[:examples], values_X[:examples], context))
        if context is not None:
            frequent.append(_frequent(chosen_NE[:, expert].nonzero()[:, 0], context))
    return {
        "total": len(chosen_NE),
        "got": chosen_NE.sum(0).tolist(),
        "first": layer.first.bincount(minlength=layer.num_experts)[: layer.num_experts].tolist(),
        "ranked": "gate" if by_gate else "affinity",
        "top": tops,
        "frequent": None if context is None else frequent,
    }


def fewer_examples(found: ExpertTokens, examples: int) -> ExpertTokens:
    """Return the same with at most `examples` of each expert."""
    return {**found, "top": [top[:examples] for top in found["top"]]}


def _descending(place_X: Tensor, key_N: Tensor) -> Tensor:
    """Sort positions by a key, largest first. The sort is stable: earlier sorts break ties."""
    return place_X[key_N[place_X].argsort(descending=True, stable=True)]


def _chosen(layer: LayerRecord) -> Tensor:
    """Return which tokens have which expert, (N, E) bool. The id E, "no expert", is left out."""
    count = layer.num_experts
    chosen_NE = torch.zeros(len(layer.expert_ids), count + 1, dtype=torch.bool)
    return chosen_NE.scatter(1, layer.expert_ids, True)[:, :count]


def _gate_of_expert(layer: LayerRecord) -> Tensor:
    """Return the gate of each token for each expert, (N, E) float64; 0 where it was not chosen."""
    count = layer.num_experts
    gate_NE = torch.zeros(len(layer.expert_ids), count + 1, dtype=torch.float64)
    return gate_NE.scatter(1, layer.expert_ids, layer.gate.double())[:, :count]


def _gates_differ(layer: LayerRecord) -> bool:
    """Return True if all gates are finite and at least two differ, so that they rank the tokens."""
    gate_X = layer.gate[layer.expert_ids < layer.num_experts].double()
    if len(gate_X) == 0 or not bool(gate_X.isfinite().all()):
        return False
    return bool(gate_X.max() - gate_X.min() > 1e-6)


def _examples(place_X: Tensor, value_X: Tensor, context: TextContext | None) -> list[Example]:
    pairs = zip(place_X.tolist(), value_X.tolist(), strict=True)
    around = (lambda place: ()) if context is None else context.around
    return [[place, round(value, 3), *around(place)] for place, value in pairs]


def _frequent(place_X: Tensor, context: TextContext) -> list[tuple[str, int]]:
    """Return the most frequent tokens with their counts; equal counts in order of appearance."""
    known = (place for place in place_X.tolist() if place < len(context.tokens))
    return Counter(context.tokens[place] for place in known).most_common(FREQUENT)
