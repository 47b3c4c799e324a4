"""The sort of routed rows on a CPU: the numbers by hand, and those of the definition."""

import pytest
import torch

from acmoe.ops.dispatch import record_choices, use_backend
from acmoe.ops.sort import sort_rows


def test_rows_are_sorted_by_expert_and_those_without_one_come_last() -> None:
    with use_backend("cpu"), record_choices() as choices:
        rows = sort_rows(torch.tensor([[2, 0], [3, 2], [0, 3]]), 3)  # 3 means no expert
    assert [choice.kernel for choice in choices] == ["cpu"]
    assert rows.permutation.tolist() == [1, 4, 0, 3, 2, 5]  # equal experts keep their order
    assert rows.inverse.tolist() == [2, 0, 4, 3, 1, 5]
    assert rows.offsets.tolist() == [2, 2, 4]
    assert rows.expert.tolist() == [0, 0, 2, 2, 3, 3]
    assert rows.order.numel() == 0


@pytest.mark.parametrize("num_experts", [5, 400])
@pytest.mark.parametrize("tokens", [1, 20, 100])  # few rows are sorted as they are
def test_the_sort_is_that_of_the_definition(tokens: int, num_experts: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(num_experts + 1, (tokens, 3)).T.contiguous().T  # not contiguous
    with use_backend("cpu"):
        found = sort_rows(ids, num_experts)
    with use_backend("torch"):
        wanted = sort_rows(ids, num_experts)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
