"""The tokens of each expert: counts, ranking and context, against loops; and those on the page."""

import json
from typing import Any

import pytest
import torch

from acmoe.analyze.record import LayerRecord
from acmoe.report.experts import (
    TextContext,
    examples_per_expert,
    fewer_examples,
    tokens_by_expert,
)

TOKENS = tuple("abcdefgh" * 3)


def layer(ids: list[list[int]], gate: torch.Tensor, affinity: torch.Tensor) -> LayerRecord:
    count = len(ids)
    return LayerRecord(
        input=torch.zeros(0, 4),
        scaled=torch.zeros(0, 4),
        affinity=affinity,
        expert_ids=torch.tensor(ids),
        gate=gate,
        cluster=torch.full((count,), -1),
        scale=torch.ones(affinity.shape[1], 4),
        scale_varies=False,
        adaptive=False,
        grid=None,
    )


def test_counts_and_ranking_agree_with_a_loop(generator: torch.Generator) -> None:
    count, experts = len(TOKENS), 4
    affinity = torch.randn(count, experts, generator=generator)
    ids = affinity.topk(2).indices
    ids[5, 1] = experts  # this token has one expert only
    gate = (torch.rand(count, 2, generator=generator) * 8).round() / 8  # with ties
    gate[5, 1] = 0.0
    found = tokens_by_expert(
        layer(ids.tolist(), gate, affinity),
        examples=5,
        among=20,
        context=TextContext(tokens=TOKENS, unit="bytes"),
    )
    assert (found["total"], found["ranked"]) == (count, "gate")
    first = affinity.argmax(1).tolist()
    for expert in range(experts):
        held = [
            (-gate[n, k].item(), -affinity[n, expert].item(), n)
            for n in range(count)
            for k in range(2)
            if ids[n, k] == expert
        ]
        assert found["got"][expert] == len(held)
        assert found["first"][expert] == first.count(expert)
        best = sorted(one for one in held if one[2] < 20)[:5]
        assert [one[:2] for one in found["top"][expert]] == [[n, -g] for g, _, n in best]
        letters = [TOKENS[n] for _, _, n in held]
        counts = {text: letters.count(text) for text in letters}
        assert [number for _, number in found["frequent"][expert]] == sorted(
            counts.values(), reverse=True
        )[:6]
        assert all(counts[text] == number for text, number in found["frequent"][expert])


@pytest.mark.parametrize("gate", [float("nan"), 1.0])
def test_gates_that_rank_nothing_give_way_to_affinities(gate: float) -> None:
    affinity = torch.tensor([[0.1, -1.0], [0.3, -1.0], [0.2, -1.0], [-1.0, 0.0]])
    ids = [[0], [0], [0], [1]]
    found = tokens_by_expert(
        layer(ids, torch.full((4, 1), gate), affinity), examples=2, among=4, context=None
    )
    assert found["ranked"] == "affinity"
    assert found["top"] == [[[1, 0.3], [2, 0.2]], [[3, 0.0]]]
    assert found["frequent"] is None


def test_an_example_has_text_before_and_after_it() -> None:
    text = "the cat sat on a mat and slept well today"
    words = TextContext(tokens=text.split(), unit="words")
    assert words.around(6) == ("cat sat on a mat", "and", "slept well today")
    assert words.around(0) == ("", "the", "cat sat on")
    letters = TextContext(tokens=TOKENS, unit="bytes")
    assert letters.around(2) == ("ab", "c", "defghabcdefg")


def test_many_experts_share_the_room_of_the_page() -> None:
    assert examples_per_expert([4, 4, 4], 2) == 12
    assert examples_per_expert([64] * 16, 1) == 5000 // 1024
    assert examples_per_expert([64] * 16, 100) == 3
    assert fewer_examples({"top": [[1, 2, 3], [4]], "got": [3, 1]}, 2) == {
        "top": [[1, 2], [4]],
        "got": [3, 1],
    }


def test_the_page_holds_what_every_expert_of_a_text_run_received(
    text_data: dict[str, Any],
) -> None:
    routing, shown = text_data["runs"][1]["routing"], text_data["samples"][0]["tokens"]
    measured = zip(routing["layers"], routing["by_expert"], routing["measures"], strict=True)
    for one, found, measures in measured:
        # Two experts per token, over all measured tokens; `load` is their share in percent.
        assert sum(found["got"]) == 2 * found["total"]
        assert sum(found["first"]) == found["total"]
        shares = [50 * got / found["total"] for got in found["got"]]
        assert shares == pytest.approx(measures["load"])
        for expert, top in enumerate(found["top"]):
            values = [value for _, value, *_ in top]
            assert values == sorted(values, reverse=True)
            for place, value, before, text, after in top:
                if place < len(one["ids"]):  # also in the explorer
                    assert one["gate"][place][one["ids"][place].index(expert)] == value
                if place + 12 < len(shown):
                    around = [shown[max(0, place - 24) : place], shown[place + 1 : place + 13]]
                    assert [before, after] == ["".join(part) for part in around]
                    assert text == shown[place]
    assert len(json.dumps(routing["by_expert"])) < 12_000  # 3 layers of 4 experts


def test_a_soft_router_is_called_soft_and_ranks_by_combine_weight(
    image_data: dict[str, Any],
) -> None:
    routing = image_data["runs"][2]["routing"]
    for one, found in zip(routing["layers"], routing["by_expert"], strict=True):
        assert found["ranked"] == "gate"
        assert found["got"] == found["first"]  # one expert of largest weight per patch
        assert found["total"] == 64 * 16
        for place, value in found["top"][0]:
            assert one["first"][place] == 0
            assert one["gate"][place] == [value]
