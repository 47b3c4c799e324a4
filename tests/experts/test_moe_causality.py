"""Statistics that let a token see the future or other sequences, and those that do not, by bits.

B sequences, L tokens in each, D features.
"""

import pytest
import torch
from moe_stack import DIM, EXPERTS, begin, stack

from acmoe import AdaptiveConfig
from slow_cases import mostly_slow

CAUSAL = {
    "plain": "smoe",
    "running": AdaptiveConfig(statistics="running"),
    "running-current": AdaptiveConfig(statistics="running", statistics_of="current"),
    "running-mixed": AdaptiveConfig(statistics="running", mix=2, normalize="global"),
    "prefix": AdaptiveConfig(statistics="prefix"),
    "prefix-variance": AdaptiveConfig(statistics="prefix", measure="variance"),
    "prefix-mixed": AdaptiveConfig(statistics="prefix", measure="std", mix=2),
    "prefix-no-prior": AdaptiveConfig(statistics="prefix", prior_tokens=0.0),
    "prefix-strength": AdaptiveConfig(statistics="prefix", strength=0.5),
}


def forward(blocks, x):
    y, state = x, begin(blocks, x)
    for block in blocks:
        y, state = block(y, state)
    return y, state.assignment.view(*x.shape[:2], -1)


def futures(x, seed=4):
    """x with everything but the first tokens of sequence 1 replaced, and how many were kept."""
    generator = torch.Generator().manual_seed(seed)
    for seen in (1, 5, 11):
        other = 3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        other[1, :seen] = x[1, :seen]
        yield seen, other


@mostly_slow("training", [True, False])
@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_and_other_sequences_change_no_bit(name, training):
    # Every token visits every expert, so that all matrix products have one shape: with fewer the
    # products themselves round differently when an expert gets more rows (see the next test).
    blocks = stack(3, router=CAUSAL[name], top_k=EXPERTS).train(training)
    x = torch.randn(3, 12, DIM, generator=torch.Generator().manual_seed(0))
    y, assignment = forward(blocks, x)
    for seen, other in futures(x):
        z, moved = forward(blocks, other)
        assert torch.equal(z[1, :seen], y[1, :seen])
        assert torch.equal(moved[1, :seen], assignment[1, :seen])


@pytest.mark.parametrize("name", CAUSAL)
def test_with_two_experts_a_token_only_the_rounding_of_products_changes(name):
    blocks = stack(3, router=CAUSAL[name]).double()
    x = torch.randn(3, 12, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, assignment = forward(blocks, x)
    for seen, other in futures(x):
        z, moved = forward(blocks, other)
        torch.testing.assert_close(z[1, :seen], y[1, :seen], rtol=1e-12, atol=1e-12)
        assert torch.equal(moved[1, :seen], assignment[1, :seen])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_router_alone_sees_no_bit_of_the_future(name):
    router = stack(1, router=CAUSAL[name])[0].moe.router
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 12, DIM, generator=generator)
    order = torch.rand(3, 12, EXPERTS, generator=generator).argsort(-1)[..., : router.mix]

    def route(tokens, clusters):
        state = begin(stack(1, router=CAUSAL[name]), tokens)
        share = torch.full_like(state.membership, 1 / router.mix)
        state = state._replace(assignment=clusters.reshape(36, -1), membership=share)
        return router(tokens, state)

    wanted = route(x, order)
    for seen, other in futures(x):
        moved = torch.rand(3, 12, EXPERTS, generator=generator).argsort(-1)[..., : router.mix]
        moved[1, :seen] = order[1, :seen]
        found = route(other, moved)
        for a, b in zip(found[:3], wanted[:3], strict=True):
            assert torch.equal(a.view(3, 12, -1)[1, :seen], b.view(3, 12, -1)[1, :seen])


@pytest.mark.parametrize("training", [True, False])
def test_batch_statistics_leak_the_future_and_other_sequences(training):
    for statistics_of in ("previous", "current"):
        config = AdaptiveConfig(statistics="batch", statistics_of=statistics_of)
        blocks = stack(3, router=config).train(training)
        x = torch.randn(2, 12, DIM)
        y, _ = forward(blocks, x)
        later, elsewhere = x.clone(), x.clone()
        later[0, 6:] = torch.randn(6, DIM)
        elsewhere[1] = torch.randn(12, DIM)
        for changed in (later, elsewhere):
            assert (forward(blocks, changed)[0][0, :6] - y[0, :6]).abs().max() > 1e-3


def test_sequence_statistics_leak_the_future_and_no_other_sequence():
    blocks = stack(3, router=AdaptiveConfig(statistics="sequence"), top_k=EXPERTS)
    x = torch.randn(2, 12, DIM)
    y, _ = forward(blocks, x)
    later, elsewhere = x.clone(), x.clone()
    later[0, 6:] = torch.randn(6, DIM)
    elsewhere[1] = torch.randn(12, DIM)
    assert (forward(blocks, later)[0][0, :6] - y[0, :6]).abs().max() > 1e-3
    assert torch.equal(forward(blocks, elsewhere)[0][0], y[0])


def test_the_first_layer_leaks_nothing_in_any_mode():
    # Before any clusters there is nothing to take statistics of.
    for statistics in ("batch", "sequence", "running", "prefix"):
        blocks = stack(1, router=AdaptiveConfig(statistics=statistics), top_k=EXPERTS)
        x = torch.randn(1, 12, DIM)
        other = x.clone()
        other[0, 6:] = torch.randn(6, DIM)
        assert torch.equal(forward(blocks, x)[0][0, :6], forward(blocks, other)[0][0, :6])
