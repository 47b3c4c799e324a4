"""The outputs of a token's experts, weighted and summed: a CPU does so in one call."""

import pytest
import torch
from torch import Tensor

from acmoe.ops.experts.reference import combine
from acmoe.ops.sort import sort_rows
from acmoe.ops.sort.reference import Rows


def case(top_k: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(top_k)
    ids_TK = torch.stack([torch.randperm(4, generator=generator)[:top_k] for _ in range(5)])
    y_ND = torch.randn(5 * top_k, 3, dtype=dtype, generator=generator)
    return ids_TK, y_ND, torch.rand(5, top_k, dtype=dtype, generator=generator)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_every_token_gets_the_weighted_rows_of_its_experts(top_k: int) -> None:
    ids_TK, y_ND, gate_TK = case(top_k)
    rows = sort_rows(ids_TK, 4)
    found = combine(y_ND, gate_TK, rows)
    for t in range(5):
        places = [rows.permutation.tolist().index(t * top_k + k) for k in range(top_k)]
        wanted = sum(gate_TK[t, k] * y_ND[place] for k, place in enumerate(places))
        torch.testing.assert_close(found[t], wanted)


@pytest.mark.parametrize("recorded", ["rows", "gate", "rows and gate"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_sum_has_the_same_bits_whatever_is_recorded(recorded: str, top_k: int) -> None:
    ids_TK, y_ND, gate_TK = case(top_k, torch.float32)
    rows = sort_rows(ids_TK, 4)
    plain = combine(y_ND, gate_TK, rows)
    y_ND.requires_grad_("rows" in recorded)
    gate_TK.requires_grad_("gate" in recorded)
    found = combine(y_ND, gate_TK, rows)
    assert found.requires_grad and not plain.requires_grad
    assert torch.equal(found, plain)


def test_two_products_and_their_sum_are_rounded_once_each_at_most() -> None:
    ids_TK, y_ND, gate_TK = case(2, torch.float32)
    rows = sort_rows(ids_TK, 4)
    product_TKD = y_ND.double()[rows.inverse].view(5, 2, 3) * gate_TK.double()[..., None]
    error_TD = (combine(y_ND, gate_TK, rows).double() - product_TKD.sum(1)).abs()
    # To round a float32 number changes it by up to 2^-24 of its size.
    bound_TD = 2**-24 * (product_TKD.abs().sum(1) + product_TKD.sum(1).abs())
    assert (error_TD <= 1.001 * bound_TD).all()


@pytest.mark.parametrize("top_k", [2, 3])
def test_first_and_second_derivatives(top_k: int) -> None:
    ids_TK, y_ND, gate_TK = case(top_k)
    rows = sort_rows(ids_TK, 4)
    leaves = (y_ND.requires_grad_(), gate_TK.requires_grad_())

    def combined(y_ND: Tensor, gate_TK: Tensor) -> Tensor:
        return combine(y_ND, gate_TK, rows)

    assert torch.autograd.gradcheck(combined, leaves)
    assert torch.autograd.gradgradcheck(combined, leaves)


def test_transforms_and_compiled_code_see_the_same_sum() -> None:
    ids_TK, y_ND, gate_TK = case(2)
    rows = sort_rows(ids_TK, 4)
    wanted = combine(y_ND, gate_TK, rows)
    batch = torch.vmap(lambda y, gate: combine(y, gate, rows))
    found = batch(torch.stack([y_ND, 2 * y_ND]), torch.stack([gate_TK, gate_TK]))
    torch.testing.assert_close(found, torch.stack([wanted, 2 * wanted]))
    compiled = torch.compile(combine, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(y_ND, gate_TK.requires_grad_(), rows), wanted)


def moved(device: str, top_k: int = 2) -> tuple[Tensor, Tensor, Rows]:
    ids_TK, y_ND, gate_TK = case(top_k, torch.float32)
    rows = sort_rows(ids_TK, 4)
    rows = rows._replace(**{name: one.to(device) for name, one in rows._asdict().items()})
    return y_ND.to(device), gate_TK.to(device), rows


@pytest.mark.parametrize(("device", "node"), [("cpu", "_Combine"), ("meta", "Sum")])
def test_a_cpu_sums_rows_in_one_call_and_other_devices_keep_the_sum_of_torch(
    device: str, node: str
) -> None:
    y_ND, gate_TK, rows = moved(device)
    found = combine(y_ND.requires_grad_(), gate_TK, rows)
    assert found.shape == (5, 3)
    assert found.grad_fn is not None and found.grad_fn.name().startswith(node)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [2, 3])
def test_autocast_of_a_gpu_sums_two_experts_in_float32_as_any_other_number(top_k: int) -> None:
    y_ND, gate_TK, rows = moved("cuda", top_k)
    y_ND = y_ND.bfloat16()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        recorded = combine(y_ND.clone().requires_grad_(), gate_TK, rows)
        assert combine(y_ND, gate_TK, rows).dtype == recorded.dtype == torch.float32
