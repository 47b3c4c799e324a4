"""The sums that the balance loss is computed from: rows of each expert, and sums of gates."""

import pytest
import torch
from torch import Tensor

from acmoe.ops.route.reference import gate_sum, load


def counted(ids_TK: Tensor) -> list[float]:
    return [float((ids_TK == expert).sum()) for expert in range(4)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_of_each_expert_are_counted_and_those_of_none_are_not(dtype: torch.dtype) -> None:
    ids_TK = torch.tensor([[0, 2], [4, 2], [1, 4]], dtype=dtype)  # 4 means no expert
    found = load(ids_TK, 4)
    assert found.tolist() == [1, 1, 2, 0] and found.dtype == torch.float32


def test_every_way_to_count_gives_the_same(generator: torch.Generator) -> None:
    ids_TK = torch.randint(0, 5, (100, 2), generator=generator)
    wanted = counted(ids_TK)
    assert load(ids_TK, 4).tolist() == wanted  # by numpy
    assert load(ids_TK.T.contiguous().T, 4).tolist() == wanted
    assert load(ids_TK, 4, torch.ones(100, dtype=torch.bool)).tolist() == wanted
    assert torch.vmap(lambda ids: load(ids, 4))(ids_TK[None])[0].tolist() == wanted
    compiled = torch.compile(load, backend="aot_eager", fullgraph=True)
    assert compiled(ids_TK, 4).tolist() == wanted
    assert load(ids_TK[:0], 4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("wrong", [-1, 5, 2**45])
def test_an_expert_that_is_not_there_is_refused(wrong: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"index out of range|out of bounds"):
        load(torch.tensor([[0, wrong]]), 4)


@pytest.mark.parametrize("temperature", [1.0, 1, 0.5])
def test_gates_are_those_of_the_temperature(temperature: float, generator: torch.Generator) -> None:
    affinity_TE = torch.randn(6, 3, dtype=torch.float64, generator=generator).requires_grad_()
    power_TE = (affinity_TE / temperature).exp()
    wanted_E = (power_TE / power_TE.sum(-1, keepdim=True)).sum(0)
    found_E = gate_sum(affinity_TE, temperature, None)
    torch.testing.assert_close(found_E, wanted_E)
    weight_E = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    grads = [torch.autograd.grad(one @ weight_E, affinity_TE)[0] for one in (found_E, wanted_E)]
    torch.testing.assert_close(*grads)
