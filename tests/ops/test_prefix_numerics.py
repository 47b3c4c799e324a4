"""Causal dispersion: gradients, exact zeros, large offsets, low precision, bounded memory.

B sequences, L tokens in each, D features, C clusters, J clusters read by each token.
"""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prefix_cases import Stream, measures, some_stream
from torch import Tensor

from acmoe.ops.statistics.prefix import PrefixMoments, prefix_dispersion, segmented_sum
from largest_tensor import LargestTensor


@measures
def test_gradcheck_in_tokens_and_moments(measure: str, generator: torch.Generator) -> None:
    stream = some_stream(generator, L=6, D=2)
    before = PrefixMoments(
        torch.tensor([[0.0, 2.0, 3.0, 0.0], [1.0, 0.0, 0.0, 2.0]], dtype=torch.float64),
        torch.randn(2, 4, 2, dtype=torch.float64, generator=generator),
        torch.rand(2, 4, 2, dtype=torch.float64, generator=generator),
    )
    assignment_BL = stream.assignment.clone()
    assignment_BL[:, 3:] = 1  # clusters long enough to have a slope

    def run(x: Tensor, mean: Tensor, spread: Tensor) -> tuple[Tensor, ...]:
        # A cluster without tokens has no mean: what stands there must not matter.
        seen = before.tokens[..., None] > 0
        moments = PrefixMoments(before.tokens, mean, torch.where(seen, spread, 0.0))
        mine = stream._replace(x=x, assignment=assignment_BL)
        found, _, after = mine.run(measure, moments)
        return found, torch.where(after.tokens[..., None] > 0, after.mean, 0.0), after.spread

    inputs = [value.requires_grad_() for value in (stream.x.double(), before.mean, before.spread)]
    assert torch.autograd.gradcheck(run, inputs)


@measures
def test_equal_tokens_have_a_dispersion_of_exactly_zero(measure: str) -> None:
    x_BLD = torch.tensor([0.1, 1000.1]).expand(1, 50, 2)
    assignment_BL = torch.arange(50)[None] % 2
    stream = Stream(x_BLD, assignment_BL, assignment_BL[..., None], None, 2)
    head, _, moments = stream.run(measure, places=slice(20))
    tail, _, _ = stream.run(measure, moments, places=slice(20, None))
    assert (head == 0).all()
    assert (tail == 0).all()


@measures
def test_a_large_common_offset_costs_no_precision(measure: str, generator: torch.Generator) -> None:
    stream = some_stream(generator, L=2000)
    stream = stream._replace(x=1000 + stream.x)
    exact, _, _ = stream._replace(x=stream.x.double()).run(measure)
    found, _, _ = stream.run(measure)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_tokens_are_summed_in_float32(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    stream = some_stream(generator)
    before = PrefixMoments.empty(2, 4, 3)
    low = stream._replace(x=stream.x.to(dtype)).run("mad", before)[0]
    assert low.dtype == torch.float32
    assert torch.equal(low, stream._replace(x=stream.x.to(dtype).float()).run("mad", before)[0])


@measures
def test_no_tensor_of_tokens_by_clusters_by_features_exists(
    measure: str, generator: torch.Generator
) -> None:
    B, L, D, C, J = 2, 64, 8, 32, 2
    read_BLJ = torch.randint(-1, C, (B, L, J), generator=generator)
    x_BLD = torch.randn(B, L, D, generator=generator, requires_grad=True)
    stream = Stream(x_BLD, read_BLJ[..., 0], read_BLJ, None, C)
    with LargestTensor() as largest:
        stream.run(measure)[0].sum().backward()
    allowed = B * L * max(D * J, C) + B * C * D
    assert 0 < largest.numel <= allowed < B * L * C * D


def test_moments_of_no_tokens_pass_through() -> None:
    before = PrefixMoments(torch.ones(2, 3), torch.full((2, 3, 4), 5.0), torch.ones(2, 3, 4))
    found, count, after = prefix_dispersion(
        torch.zeros(2, 0, 4),
        torch.zeros(2, 0, dtype=torch.long),
        torch.zeros(2, 0, 1, dtype=torch.long),
        before,
    )
    assert found.shape == (2, 0, 1, 4)
    assert count.shape == (2, 0, 1)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_segmented_sum_is_a_cumulative_sum_of_each_segment(lengths: list[int], seed: int) -> None:
    value = torch.randn(2, sum(lengths), 3, generator=torch.Generator().manual_seed(seed)).double()
    start = torch.cat([torch.arange(length) == 0 for length in lengths]).expand(2, -1)
    expected = torch.cat([part.cumsum(1) for part in value.split(lengths, dim=1)], 1)
    torch.testing.assert_close(segmented_sum(value, start), expected)


def test_gradcheck_of_the_segmented_sum(generator: torch.Generator) -> None:
    value = torch.randn(2, 7, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    start = torch.tensor([[1, 0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    of_value = functools.partial(segmented_sum, start_BL=start)
    assert torch.autograd.gradcheck(of_value, value)
    assert torch.autograd.gradgradcheck(of_value, value)


# The compiler itself makes an instance of a torch.autograd.Function while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_compiler_sees_one_graph(generator: torch.Generator) -> None:
    stream = some_stream(generator)

    def run(x: Tensor) -> Tensor:
        return stream._replace(x=x).run("std")[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(stream.x), run(stream.x))
