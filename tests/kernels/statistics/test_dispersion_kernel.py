"""The dispersion kernels against the float64 reference: numbers, gradients, and what they promise.

T = 70 tokens are more than one block and no multiple of one; D = 37 features likewise.
"""

import pytest
import torch
from torch import Tensor

from acmoe.errors import UserError
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.dispersion_op import dispersion_op, fused_dispersion
from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

T, D, C = 70, 37, 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Terms are cut into two bf16 numbers: at most 2^-16 even where a conversion truncates, as in the
# interpreter (2^-18 where it rounds, as on a GPU).
TERM = 2.0**-16


def drawn(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Skewed values, cluster 4 of one token, cluster 5 empty, some tokens nowhere or masked."""
    x = torch.randn(T, D, generator=generator).exp().to(dtype)
    assignment = torch.randint(-1, 4, (T,), generator=generator)
    assignment[11] = 4
    mask = torch.rand(T, generator=generator) < 0.8
    mask[11] = True
    return x, assignment, mask


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs() / wanted.abs().clamp(min=1e-12)).max().item()


@mostly_slow("dtype", DTYPES, gpu=range(3))
@pytest.mark.parametrize("measure", ["mad", "variance", "std"])
def test_the_kernel_is_the_reference(
    measure: str, dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    x, assignment, mask = (tensor.to(device) for tensor in drawn(generator, dtype))
    found, count = fused_dispersion(x, assignment, C, measure=measure, token_mask=mask)
    wanted, wanted_count = dispersion_and_count(
        x.double(), assignment, C, measure=measure, token_mask=mask
    )
    assert relative_error(found, wanted) < TERM
    assert torch.equal(count, wanted_count)
    assert found.dtype == torch.float32
    assert (found[4:] == 0).all()  # one token, and none


@pytest.mark.parametrize("measure", ["mad", "variance", "std"])
def test_the_gradient_is_the_references(
    measure: str, generator: torch.Generator, device: str
) -> None:
    x, assignment, mask = (tensor.to(device) for tensor in drawn(generator, torch.float32))
    upstream = torch.randn(C, D, generator=generator).to(device)
    x.requires_grad_()
    found, _ = fused_dispersion(x, assignment, C, measure=measure, token_mask=mask)
    (grad,) = torch.autograd.grad(found, x, upstream)
    wide = x.detach().double().requires_grad_()
    wanted, _ = dispersion_and_count(wide, assignment, C, measure=measure, token_mask=mask)
    (wanted_grad,) = torch.autograd.grad(wanted, wide, upstream.double())
    assert (grad - wanted_grad).abs().max() < TERM * wanted_grad.abs().max()
    assert (grad[~mask | (assignment < 0)] == 0).all()


def test_one_cluster_may_hold_every_token(generator: torch.Generator, device: str) -> None:
    x = torch.randn(T, D, generator=generator).to(device, torch.bfloat16)
    everywhere = torch.full((T,), 3, device=device)
    found, count = fused_dispersion(x, everywhere, C)
    wanted, _ = dispersion_and_count(x.double(), everywhere, C)
    assert relative_error(found[3], wanted[3]) < TERM
    assert count.tolist() == [0, 0, 0, T, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tokens_have_a_dispersion_of_exactly_zero(dtype: torch.dtype, device: str) -> None:
    # 0.1 is no binary number: 70 * 0.1 / 70 rounds away from it unless sums are exact or anchored.
    x = torch.full((T, D), 0.1, device=device, dtype=dtype)
    found, _ = fused_dispersion(x, torch.arange(T, device=device) % 3, C)
    assert (found == 0).all()


@pytest.mark.parametrize("measure", ["mad", "variance"])
def test_a_large_offset_costs_no_precision(
    measure: str, generator: torch.Generator, device: str
) -> None:
    x = (1000 + torch.randn(T, D, generator=generator)).to(device)
    assignment = (torch.arange(T) % 4).to(device)
    found, _ = fused_dispersion(x, assignment, C, measure=measure)
    wanted, _ = dispersion_and_count(x.double(), assignment, C, measure=measure)
    assert relative_error(found[:4], wanted[:4]) < 1e-4


@pytest.mark.parametrize(
    ("bad", "dtype"), [(float("nan"), torch.bfloat16), (float("inf"), torch.float32)]
)
def test_a_bad_token_spoils_its_own_cluster_only(
    bad: float, dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    x, assignment, mask = (tensor.to(device) for tensor in drawn(generator, dtype))
    assignment[2], mask[2] = 1, True
    clean, _ = fused_dispersion(x, assignment, C, token_mask=mask)
    x[2, 5] = bad
    x[~mask] = bad  # padding may hold anything
    found, count = fused_dispersion(x, assignment, C, token_mask=mask)
    others = torch.tensor([0, 2, 3, 4, 5], device=device)
    assert found[1].isnan().all()
    assert torch.equal(found[others], clean[others])
    assert count[1] == (mask & (assignment == 1)).sum()
    # Nothing flows back through the spoiled cluster, and nothing infinite through the others.
    leaf = x.clone().requires_grad_()
    spread, _ = fused_dispersion(leaf, assignment, C, token_mask=mask)
    spread.sum().backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all()
    assert (leaf.grad[assignment == 1] == 0).all()


def test_each_sequence_has_statistics_of_its_own(generator: torch.Generator, device: str) -> None:
    x = torch.randn(3, 20, D, generator=generator).to(device)
    assignment = torch.randint(0, C, (3, 20), generator=generator).to(device)
    together, count = fused_dispersion(x, assignment, C)
    for one, its_count, tokens, clusters in zip(together, count, x, assignment, strict=True):
        alone, alone_count = fused_dispersion(tokens, clusters, C)
        assert torch.equal(one, alone) and torch.equal(its_count, alone_count)


def test_more_clusters_than_a_block_and_few_tokens(generator: torch.Generator, device: str) -> None:
    x = torch.randn(9, 5, generator=generator).to(device)
    assignment = torch.tensor([0, 0, 130, 130, 139, 139, 139, -1, 128], device=device)
    found, count = fused_dispersion(x, assignment, 140, measure="std")
    wanted, wanted_count = dispersion_and_count(x.double(), assignment, 140, measure="std")
    assert torch.allclose(found.double(), wanted, rtol=2e-5, atol=1e-7)
    assert torch.equal(count, wanted_count)


@pytest.mark.parametrize("measure", ["mad", "std", "iqr"])
def test_no_tokens_no_dispersion(measure: str, device: str) -> None:
    x = torch.empty(0, D, device=device, dtype=torch.bfloat16)
    found, count = fused_dispersion(x, torch.empty(0, device=device).long(), C, measure=measure)
    assert (found == 0).all() and (count == 0).all()


def test_equal_inputs_give_equal_bits(generator: torch.Generator, device: str) -> None:
    x, assignment, mask = (tensor.to(device) for tensor in drawn(generator, torch.bfloat16))
    first, _ = fused_dispersion(x, assignment, C, token_mask=mask)
    again, _ = fused_dispersion(x.clone(), assignment, C, token_mask=mask)
    assert torch.equal(first, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quartiles_are_exact(dtype: torch.dtype, generator: torch.Generator, device: str) -> None:
    # Clusters of 2, 20 and 0 tokens, values with ties, both signs and a -0.
    x = ((torch.randn(24, 3, generator=generator) * 2).round() / 4).to(device, dtype)
    x[3] = -0.0
    assignment = torch.tensor([0, 0, *[1] * 18, -1, 1, 1, -1], device=device)
    found, count = fused_dispersion(x, assignment, 3, measure="iqr")
    wanted, wanted_count = dispersion_and_count(x.double(), assignment, 3, measure="iqr")
    assert torch.equal(found.double(), wanted)
    assert torch.equal(count, wanted_count)


def test_quartiles_far_from_zero_keep_their_digits(generator: torch.Generator, device: str) -> None:
    x = (1000 + torch.randn(40, 3, generator=generator)).to(device)
    assignment = (torch.arange(40) % 7).to(device)  # clusters of 5 and 6 tokens
    found, _ = fused_dispersion(x, assignment, 7, measure="iqr")
    wanted, _ = dispersion_and_count(x.double(), assignment, 7, measure="iqr")
    assert torch.allclose(found.double(), wanted, rtol=1e-6, atol=0.0)


def test_quartiles_of_a_cluster_with_a_bad_token_are_nan(device: str) -> None:
    x = torch.arange(12.0, device=device, dtype=torch.float16).view(6, 2)
    x[4, 1] = float("inf")
    assignment = torch.tensor([0, 0, 0, 1, 1, 1], device=device)
    found, _ = fused_dispersion(x, assignment, 2, measure="iqr")
    # 0, 2, 4: the quartiles are 1 and 3.
    assert found[0].tolist() == [2.0, 2.0]
    assert found[1].isnan().all()


def test_iqr_keeps_the_references_gradient(generator: torch.Generator, device: str) -> None:
    x = torch.randn(9, 3, generator=generator).to(device).requires_grad_()
    assignment = torch.zeros(9, device=device).long()
    grads = [
        torch.autograd.grad(function(x, assignment, 1, measure="iqr")[0].sum(), x)[0]
        for function in (fused_dispersion, dispersion_and_count)
    ]
    assert torch.equal(*grads)


@pytest.mark.parametrize("measure", ["mad", "iqr"])
def test_an_id_that_is_no_cluster_counts_nowhere(
    measure: str, generator: torch.Generator, device: str
) -> None:
    # On a GPU ids are not checked: that would take longer than the statistics.
    x = torch.randn(1, 9, 3, generator=generator).to(device)
    assignment = torch.tensor([[0, 0, 1, 1, -1, 0, 1, -1, 0]], device=device)
    wrong = torch.where(assignment < 0, 99, assignment)
    found, wanted = (dispersion_op(x, ids, None, 2, measure)[:2] for ids in (wrong, assignment))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_the_op_is_well_formed(generator: torch.Generator, device: str) -> None:
    x, assignment, mask = (tensor.to(device) for tensor in drawn(generator, torch.float32))
    args = x[None, :9, :3].requires_grad_(), assignment[None, :9], mask[None, :9], C, "mad"
    torch.library.opcheck(
        dispersion_op,
        args,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_what_has_no_kernel_is_refused(device: str) -> None:
    x = torch.ones(4, 2, device=device)
    assignment = torch.zeros(4, device=device).long()
    with pytest.raises(UserError, match="gini"):
        fused_dispersion(x, assignment, 1, measure="gini")
    with pytest.raises(UserError, match="float64"):
        fused_dispersion(x.double(), assignment, 1)
