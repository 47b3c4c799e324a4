"""The router of few tokens on a CPU: numbers by hand, and the bits of the definition.

T tokens, D features, E experts, K experts per token.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from two_of_three import EMBEDDING_ED, OPTIONS, X_TD, check_by_hand, kernel_of

from acmoe import MoE
from acmoe.ops.dispatch import record_choices
from acmoe.ops.route import Route, ScaledTokens, cpu, route

pytestmark = pytest.mark.usefixtures("no_native_here")


def assert_same(found: Route, wanted: Route) -> None:
    for name, one, other in zip(found._fields, found, wanted, strict=True):
        if other is None:
            assert one is None, name
            continue
        assert one is not None and one.dtype == other.dtype and one.is_contiguous(), name
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=name)


def test_experts_are_ranked_and_their_gates_sum_to_one() -> None:
    assert kernel_of(ScaledTokens(X_TD), EMBEDDING_ED) == "cpu"
    check_by_hand()


@given(
    tokens=st.integers(1, 40),
    dim=st.integers(1, 20),
    experts=st.integers(1, 12),
    top_k=st.integers(1, 12),
    over_selected=st.booleans(),
    bias=st.booleans(),
    scaled=st.booleans(),
    sequences=st.booleans(),
    temperature=st.sampled_from([None, 1.0, 0.7]),
    levels=st.sampled_from([0, 1, 2]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_results_have_the_bits_of_the_definition(
    tokens: int,
    dim: int,
    experts: int,
    top_k: int,
    over_selected: bool,
    bias: bool,
    scaled: bool,
    sequences: bool,
    temperature: float | None,
    levels: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, dtype=dtype)
        return drawn if levels == 0 else (drawn * levels).round()  # whole numbers have ties

    x = normal(tokens, dim)
    given = ScaledTokens(x[None] if sequences else x)
    if scaled:
        cluster_T = torch.randint(-1, experts, (tokens,), generator=generator)
        given = given._replace(scale=normal(experts, dim).exp(), assignment=cluster_T)
    args = (given, normal(experts, dim), normal(experts) if bias else None)
    options: dict[str, Any] = {
        "top_k": min(top_k, experts),
        "over_selected": over_selected,
        "temperature": temperature,
    }
    assert kernel_of(*args, **options) == ("torch" if options["top_k"] == 1 else "cpu")
    assert_same(route(*args, **options), route.definition(*args, **options))


@pytest.mark.parametrize("top_k", [2, 4])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 0.0, -0.0])
def test_bad_huge_and_equal_values_are_ranked_as_in_the_definition(
    value: float, tokens: int, top_k: int
) -> None:
    x_TD, embedding_ED = torch.ones(tokens, 3), torch.eye(4, 3)
    for bad in (x_TD, embedding_ED):
        kept = bad[0, 1].item()
        bad[0, 1] = value
        options = {**OPTIONS, "top_k": top_k}
        args = (ScaledTokens(x_TD), embedding_ED, None)
        assert kernel_of(*args, **options) == "cpu"
        assert_same(route(*args, **options), route.definition(*args, **options))
        bad[0, 1] = kept


class Traced(Tensor):
    """A subclass, whose calls somebody may observe."""


def test_other_calls_run_the_definition() -> None:
    x, embedding = torch.randn(3, 4), torch.randn(5, 4)
    assert kernel_of(ScaledTokens(x), embedding) == "cpu"
    assert kernel_of(ScaledTokens(x), embedding, top_k=1) == "torch"
    assert kernel_of(ScaledTokens(x[:0]), embedding) == "torch"
    assert kernel_of(ScaledTokens(torch.randn(cpu.FEW, 4)), embedding) == "torch"
    assert kernel_of(ScaledTokens(x.bfloat16()), embedding) == "torch"
    assert kernel_of(ScaledTokens(x.double()), embedding) == "torch"
    assert kernel_of(ScaledTokens(x), embedding, torch.randn(5).double()) == "torch"
    assert kernel_of(ScaledTokens(x, product=2 * x), embedding) == "torch"
    assert kernel_of(ScaledTokens(x.as_subclass(Traced)), embedding) == "torch"
    assert kernel_of(ScaledTokens(x), embedding, noise=torch.randn(3, 5)) == "torch"
    mask = torch.tensor([True, False, True])
    assert kernel_of(ScaledTokens(x), embedding, token_mask=mask) == "torch"
    with torch.autocast("cpu", torch.bfloat16):
        assert kernel_of(ScaledTokens(x), embedding) == "torch"
    learned = embedding.clone().requires_grad_()
    assert kernel_of(ScaledTokens(x), learned) == "torch"
    with torch.no_grad():
        assert kernel_of(ScaledTokens(x), learned) == "cpu"


def test_a_layer_without_gradients_routes_as_one_with_them() -> None:
    torch.manual_seed(0)
    moe = MoE(dim=16, hidden=8, num_experts=6, top_k=3, router="adaptive")
    x = torch.randn(4, 2, 16)
    wanted, state = moe(x)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, record_choices() as choices:
            found, other = moe(x)
        assert {choice.op: choice.kernel for choice in choices}["route"] == "cpu"
        torch.testing.assert_close(found, wanted.detach())
        assert torch.equal(other.assignment, state.assignment)
        torch.testing.assert_close(other.aux_loss, state.aux_loss.detach())


def test_transforms_run_the_definition() -> None:
    x, embedding = torch.randn(2, 3, 4), torch.randn(5, 4)

    def affinity(x_TD: Tensor) -> Tensor:
        return route(ScaledTokens(x_TD), embedding, None, **OPTIONS).gate

    found = torch.func.vmap(affinity)(x)
    torch.testing.assert_close(found, torch.stack([affinity(one) for one in x]))
