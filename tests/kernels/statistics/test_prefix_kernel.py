"""Running statistics by kernel against the float64 reference, and the causality they promise.

Two sequences of 43 tokens: lists are longer than the four tokens that are loaded at once.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from acmoe.ops.statistics.prefix import PrefixMoments, launched, prefix_dispersion
from acmoe.ops.statistics.prefix.launched import prefix_op
from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

B, L, D, C = 2, 43, 70, 4


def dispersion(x: Tensor, assignment: Tensor, before: PrefixMoments, **named: Any) -> Any:
    """Run the kernel for clusters (B, L)."""
    given = {"measure": "mad"} | named
    return launched.fused_prefix_dispersion(x, assignment[..., None], before, **given)


def drawn(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Cluster 3 is empty, and some tokens are nowhere or masked."""
    x = torch.randn(B, L, D, generator=generator).to(dtype)
    assignment = torch.randint(-1, C - 1, (B, L), generator=generator)
    return x, assignment, torch.rand(B, L, generator=generator) < 0.8


def some_moments(generator: torch.Generator) -> PrefixMoments:
    tokens = torch.tensor([[0.0, 2, 5, 0], [3, 0, 1, 7]])
    return PrefixMoments(
        tokens,
        torch.randn(B, C, D, generator=generator),
        torch.rand(B, C, D, generator=generator) * tokens[..., None],
    )


@mostly_slow("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("measure", ["mad", "variance", "std"])
def test_the_kernel_is_the_reference(
    measure: str, dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    x, assignment, mask = (tensor.to(device) for tensor in drawn(generator, dtype))
    before = PrefixMoments(*(moment.to(device) for moment in some_moments(generator)))
    found, count, after = dispersion(x, assignment, before, measure=measure, token_mask=mask)
    wanted, wanted_count, wanted_after = prefix_dispersion(
        x.double(),
        assignment,
        assignment[..., None],
        PrefixMoments(*(moment.double() for moment in before)),
        measure=measure,
        token_mask=mask,
    )
    counted = mask & (assignment >= 0)
    assert torch.allclose(found[counted].double(), wanted[counted], rtol=1e-5, atol=1e-6)
    assert torch.equal(count[counted].double(), wanted_count[counted])
    assert (found[~counted] == 0).all() and (count[~counted] == 0).all()
    for one, other in zip(after, wanted_after, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-5)


def test_neither_the_future_nor_other_clusters_change_a_bit(
    generator: torch.Generator, device: str
) -> None:
    x, assignment, _ = (tensor.to(device) for tensor in drawn(generator, torch.float32))
    before = PrefixMoments.empty(B, C, D, device=device)
    found, _, _ = dispersion(x, assignment, before)
    cut = 30
    later_x, later_assignment = x.clone(), assignment.clone()
    later_x[:, cut:] = float("nan")
    later_assignment[:, cut:] = 0
    changed, _, _ = dispersion(later_x, later_assignment, before)
    assert torch.equal(found[:, :cut], changed[:, :cut])
    other_x = torch.where((assignment == 0)[..., None], x * 3 + 1, x)
    changed, _, _ = dispersion(other_x, assignment, before)
    assert torch.equal(found[assignment > 0], changed[assignment > 0])


def test_masked_tokens_change_nothing(generator: torch.Generator, device: str) -> None:
    x, assignment, mask = (tensor.to(device) for tensor in drawn(generator, torch.float32))
    before = PrefixMoments.empty(B, C, D, device=device)
    found, count, after = dispersion(x, assignment, before, token_mask=mask)
    x[~mask] = float("nan")
    elsewhere = torch.where(mask, assignment, 2)
    again, again_count, again_after = dispersion(x, elsewhere, before, token_mask=mask)
    pairs = zip((found, count, *after), (again, again_count, *again_after), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_token_that_is_not_finite_is_left_out(generator: torch.Generator, device: str) -> None:
    x, assignment, mask = (tensor.to(device) for tensor in drawn(generator, torch.float32))
    before = PrefixMoments.empty(B, C, D, device=device)
    found, count, after = dispersion(x, assignment, before, token_mask=mask)
    x[~mask] = torch.tensor([float("nan"), float("inf")], device=device).repeat(D // 2)
    again, again_count, again_after = dispersion(x, assignment, before)
    pairs = zip((found, count, *after), (again, again_count, *again_after), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_equal_tokens_have_a_dispersion_of_exactly_zero(device: str) -> None:
    x = torch.full((1, L, 3), 0.1, device=device)
    before = PrefixMoments.empty(1, 1, 3, device=device)
    found, _, after = dispersion(x, torch.zeros(1, L, device=device).long(), before)
    assert (found == 0).all()
    assert (after.mean == x[0, 0]).all() and after.tokens.item() == L


def test_decoding_continues_where_the_prompt_stopped(
    generator: torch.Generator, device: str
) -> None:
    x, assignment, _ = (tensor.to(device) for tensor in drawn(generator, torch.float32))
    moments = PrefixMoments.empty(B, C, D, device=device)
    whole, _, _ = dispersion(x, assignment, moments, measure="std")
    parts = []
    for step in (slice(0, 40), slice(40, 41), slice(41, 43)):
        part, _, moments = dispersion(x[:, step], assignment[:, step], moments, measure="std")
        parts.append(part)
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)


def test_no_tokens_leave_the_moments_alone(generator: torch.Generator, device: str) -> None:
    before = PrefixMoments(*(moment.to(device) for moment in some_moments(generator)))
    x = torch.empty(B, 0, D, device=device)
    found, count, after = dispersion(x, torch.empty(B, 0, device=device).long(), before)
    assert found.shape == (B, 0, 1, D) and count.shape == (B, 0, 1)
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_a_gradient_is_the_references(generator: torch.Generator, device: str) -> None:
    x, assignment, _ = (tensor.to(device) for tensor in drawn(generator, torch.float32))
    x.requires_grad_()
    before = PrefixMoments.empty(B, C, D, device=device)
    found, _, _ = dispersion(x, assignment, before)
    wanted, _, _ = prefix_dispersion(x, assignment, assignment[..., None], before)
    one, other = (torch.autograd.grad(spread.sum(), x)[0] for spread in (found, wanted))
    assert torch.equal(one, other)


def test_the_op_is_well_formed(generator: torch.Generator, device: str) -> None:
    x = torch.randn(1, 5, 3, generator=generator).to(device)
    before = PrefixMoments.empty(1, 2, 3, device=device)
    args = (x, torch.zeros(1, 5, device=device).long(), None, *before, "mad")
    torch.library.opcheck(prefix_op, args, test_utils=("test_schema", "test_faketensor"))
