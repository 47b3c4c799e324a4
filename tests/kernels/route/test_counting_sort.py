"""The counting sort of routed rows (sort/triton/sort.py) against torch's stable sort."""

import pytest
import torch

from acmoe.ops.sort import sort_rows


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(100, 2, 5), (1, 1, 1), (700, 3, 16), (300, 8, 40), (64, 2, 100)],
)
def test_the_counting_sort_is_the_stable_sort(tokens, top_k, experts, device, monkeypatch):
    from acmoe.ops.sort.triton import sort
    from acmoe.ops.sort.triton.sort import sort_rows as counting_sort

    monkeypatch.setattr(sort, "FEW_ROWS", 0)
    torch.manual_seed(tokens)
    ids = torch.randint(0, experts + 1, (tokens, top_k), device=device)
    right = sort_rows.definition(ids, experts)
    for found, wanted in zip(counting_sort(ids, experts), right[:4], strict=True):
        assert torch.equal(found, wanted)
