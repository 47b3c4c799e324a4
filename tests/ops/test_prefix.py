"""Causal dispersion: brute force at every token, and bitwise causality.

B sequences, L tokens in each, D features, C clusters, J clusters read by each token.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prefix_cases import Stream, measures, some_stream
from torch import Tensor

from acmoe.ops.statistics.prefix import PrefixMoments, prefix_dispersion


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    B, L, D = draw(st.integers(1, 3)), draw(st.integers(0, 12)), draw(st.integers(1, 3))
    C, J = draw(st.sampled_from([1, 2, 5, 64])), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    used = draw(st.lists(st.integers(-1, C - 1), min_size=1, max_size=3))
    assignment = rng.choice(used, size=(B, L)).astype(np.int64)
    read = rng.choice(used, size=(B, L, J)).astype(np.int64)
    read[..., 0] = assignment
    x = rng.normal(size=(B, L, D)) if draw(st.booleans()) else rng.integers(0, 2, (B, L, D)) / 10
    mask = torch.from_numpy(rng.random((B, L)) < 0.7) if draw(st.booleans()) else None
    return Stream(
        torch.from_numpy(x.astype(np.float64)),
        torch.from_numpy(assignment),
        torch.from_numpy(read),
        mask,
        C,
    )


def online(values: Sequence[float], measure: str) -> float:
    """The definition on one feature of a cluster's tokens so far, in the order they came."""
    if not values:
        return 0.0
    if measure == "mad":
        seen = [math.fsum(values[: i + 1]) / (i + 1) for i in range(len(values))]
        return math.fsum(abs(v - m) for v, m in zip(values, seen, strict=True)) / len(values)
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / len(values)
    return variance if measure == "variance" else math.sqrt(variance)


def brute_force(stream: Stream, measure: str) -> tuple[Tensor, Tensor]:
    B, L, D = stream.x.shape
    J = stream.read.shape[2]
    result = torch.zeros(B, L, J, D, dtype=torch.float64)
    count = torch.zeros(B, L, J, dtype=torch.float64)
    for b, t, j in np.ndindex(B, L, J):
        cluster = stream.read[b, t, j]
        upto = [
            i
            for i in range(t + 1)
            if cluster >= 0
            and stream.assignment[b, i] == cluster
            and (stream.token_mask is None or stream.token_mask[b, i])
        ]
        count[b, t, j] = len(upto)
        for feature in range(D):
            values = [stream.x[b, i, feature].item() for i in upto]
            result[b, t, j, feature] = online(values, measure)
    return result, count


@measures
@given(stream=streams())
def test_every_token_sees_the_definition_over_its_prefix(measure: str, stream: Stream) -> None:
    found, count, after = stream.run(measure)
    expected, tokens = brute_force(stream, measure)
    # A variance of 0 in exact arithmetic is up to 1e-17 in the loop, its root up to 1e-8.
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-8)
    assert torch.equal(count, tokens)
    counted = stream.assignment if stream.token_mask is None else stream.assignment.clone()
    if stream.token_mask is not None:
        counted[~stream.token_mask] = -1
    for cluster in range(stream.num_clusters):
        assert torch.equal(after.tokens[:, cluster], (counted == cluster).sum(1).double())


def test_one_sequence_by_hand() -> None:
    # Cluster 0 sees 2, 6, 1 at times 0, 1, 3; cluster 1 sees 5 at time 2, where cluster 0 is read.
    # Means so far 2, 4, 3: deviations |2-2|, |6-4|, |1-3| = 0, 2, 2 with averages 0, 1, 4/3.
    # Variances of the prefixes: 0, 4, (1 + 9 + 4)/3 = 14/3.
    x_BLD = torch.tensor([[[2.0], [6.0], [5.0], [1.0]]])
    assignment_BL = torch.tensor([[0, 0, 1, 0]])
    read_BLJ = torch.zeros(1, 4, 1, dtype=torch.long)
    for measure, expected in (("mad", [0, 1, 1, 4 / 3]), ("variance", [0, 4, 4, 14 / 3])):
        found, count, after = prefix_dispersion(
            x_BLD, assignment_BL, read_BLJ, PrefixMoments.empty(1, 2, 1), measure=measure
        )
        torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float32))
        assert count.flatten().tolist() == [1, 2, 2, 3]
        assert after.tokens.tolist() == [[3, 1]]
        torch.testing.assert_close(after.mean.flatten(), torch.tensor([3.0, 5.0]))


@measures
@given(stream=streams(), split=st.integers(0, 12))
def test_continuing_from_moments_equals_one_call(measure: str, stream: Stream, split: int) -> None:
    split = min(split, stream.x.shape[1])
    whole, count, after = stream.run(measure)
    head, head_count, moments = stream.run(measure, places=slice(split))
    tail, tail_count, end = stream.run(measure, moments, places=slice(split, None))
    torch.testing.assert_close(torch.cat([head, tail], 1), whole, rtol=1e-10, atol=1e-8)
    assert torch.equal(torch.cat([head_count, tail_count], 1), count)
    assert torch.equal(end.tokens, after.tokens)
    torch.testing.assert_close(end.mean, after.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(end.spread, after.spread, rtol=1e-10, atol=1e-12)


def test_token_by_token_equals_one_call(generator: torch.Generator) -> None:
    stream = some_stream(generator)
    whole, _, _ = stream.run("mad")
    moments = None
    for t in range(stream.x.shape[1]):
        step, _, moments = stream.run("mad", moments, places=slice(t, t + 1))
        torch.testing.assert_close(step[:, 0], whole[:, t])


@measures
def test_the_future_and_other_sequences_change_no_bit(
    measure: str, generator: torch.Generator
) -> None:
    stream = some_stream(generator, B=3, L=33)
    plain, plain_count, _ = stream.run(measure)
    for t in (0, 7, 8, 20, 31):
        # Content, clusters (so the sort differs) and padding of all that lies behind t.
        future = torch.zeros(3, 33, dtype=torch.bool)
        future[:, t + 1 :] = True
        future[1] = True
        assignment = torch.randint(-1, 4, (3, 33), generator=generator)
        assert stream.token_mask is not None
        other = Stream(
            torch.where(
                future[..., None], 1e3 * torch.randn(3, 33, 3, generator=generator), stream.x
            ),
            torch.where(future, assignment, stream.assignment),
            torch.where(future[..., None], assignment[..., None], stream.read),
            torch.where(future, torch.rand(3, 33, generator=generator) < 0.5, stream.token_mask),
            4,
        )
        found, count, _ = other.run(measure)
        for b in (0, 2):
            assert torch.equal(found[b, : t + 1], plain[b, : t + 1])
            assert torch.equal(count[b, : t + 1], plain_count[b, : t + 1])


@measures
def test_no_gradient_reaches_the_future_or_other_sequences(
    measure: str, generator: torch.Generator
) -> None:
    stream = some_stream(generator)
    x = stream.x.requires_grad_()
    found, _, _ = stream.run(measure)
    (gradient,) = torch.autograd.grad(found[0, :15].square().sum(), x)
    assert (gradient[0, 15:] == 0).all()
    assert (gradient[1:] == 0).all()
    assert (gradient[0, :15] != 0).any()


@measures
@pytest.mark.parametrize("content", [math.nan, math.inf, 3e38])
def test_what_padding_holds_changes_no_bit(
    measure: str, content: float, generator: torch.Generator
) -> None:
    stream = some_stream(generator)
    assert stream.token_mask is not None
    results = []
    for filled in (0.0, content):
        x = stream.x.masked_fill(~stream.token_mask[..., None], filled).requires_grad_()
        found, _, after = stream._replace(x=x).run(measure)
        (gradient,) = torch.autograd.grad(found.square().sum(), x)
        assert (gradient[~stream.token_mask] == 0).all()
        results.append((found, gradient, *after))
    for before, now in zip(*results, strict=True):
        assert torch.equal(before, now)


@measures
def test_a_token_that_is_not_finite_is_left_out_of_the_statistics(
    measure: str, generator: torch.Generator
) -> None:
    stream = some_stream(generator)._replace(token_mask=None)
    stream.assignment[0, 9] = 2
    mask = torch.ones(stream.x.shape[:2], dtype=torch.bool)
    mask[0, 9] = False
    wanted, wanted_count, wanted_after = stream._replace(token_mask=mask).run(measure)
    for bad in (math.nan, -math.inf):
        broken = stream.x.clone()
        broken[0, 9, 1] = bad
        found, count, after = stream._replace(x=broken).run(measure)
        assert torch.equal(found[mask], wanted[mask])
        assert torch.equal(count[mask], wanted_count[mask])
        assert (found[0, 9] == 0).all() and (count[0, 9] == 0).all()
        assert all(torch.equal(one, other) for one, other in zip(after, wanted_after, strict=True))
