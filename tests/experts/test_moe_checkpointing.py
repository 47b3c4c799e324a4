"""Activation checkpointing and compilation: the gradients and statistics of plain eager.

B sequences, L tokens in each, D features.
"""

import copy
from functools import partial

import pytest
import torch
from moe_stack import DIM, begin, stack
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from acmoe import (
    AdaptiveConfig,
    LossConfig,
    MoE,
    RandomConfig,
    RoutingState,
    SMoEConfig,
    UserError,
    fold_statistics,
)
from slow_cases import mostly_slow

ROUTERS = {
    "batch-previous": AdaptiveConfig(statistics="batch"),
    "batch-current": AdaptiveConfig(statistics="batch", statistics_of="current"),
    "running-previous": AdaptiveConfig(statistics="running"),
    "running-current": AdaptiveConfig(statistics="running", statistics_of="current"),
    "prefix": AdaptiveConfig(statistics="prefix", mix=2),
    "through-the-scale": AdaptiveConfig(statistics="batch", detach=False, strength=0.7),
    "loss-free": SMoEConfig(bias_balancing=0.1),
    "noise": SMoEConfig(noise=1.0),
    "random": RandomConfig(),
}
COMPILED = ["batch-previous", "batch-current", "running-previous", "running-current"]
HEADLINE = {("running-current", True)}  # the rest takes a minute
GRAPHS = [
    pytest.param(name, replay, marks=() if (name, replay) in HEADLINE else pytest.mark.slow)
    for name in COMPILED
    for replay in (False, True)
]


def loss_of(blocks, x, *, replay, mask=None):
    y, state = x, begin(getattr(blocks, "plain", blocks), x)
    for block in blocks:
        if replay:
            y, state = checkpoint(block, y, state, mask, use_reentrant=False)
        else:
            y, state = block(y, state, mask)
    return y.square().mean() + state.aux_loss


class Wrapped(list):
    """Compiled blocks, beside the plain ones they share parameters with."""

    def __init__(self, plain, backend):
        super().__init__(torch.compile(block, fullgraph=True, backend=backend) for block in plain)
        self.plain = plain


def two_in_flight(blocks, *, replay):
    """Two forwards before one backward, as pipelines and contrastive losses do."""
    generator = torch.Generator().manual_seed(9)
    first, second = torch.randn(2, 2, 6, DIM, generator=generator)
    torch.manual_seed(10)  # of dropout, noise and random scales
    loss = loss_of(blocks, first, replay=replay) - 0.5 * loss_of(blocks, second, replay=replay)
    loss.backward()
    parameters = getattr(blocks, "plain", blocks).parameters()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in parameters]


def assert_same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    for a, b in zip(found[1], wanted[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@mostly_slow("name", ROUTERS, keep=(2, 4, 7))
def test_two_checkpointed_forwards_in_flight_give_the_gradients_of_plain_eager(name):
    blocks = stack(4, router=ROUTERS[name])
    other = copy.deepcopy(blocks)
    wanted = two_in_flight(blocks, replay=False)
    found = two_in_flight(other, replay=True)
    assert torch.equal(found[0], wanted[0])
    for a, b in zip(found[1], wanted[1], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@mostly_slow("name", [*COMPILED, "prefix", "loss-free"], keep=(0, 4))
def test_a_replayed_forward_is_not_counted_twice(name):
    # Three optimizer steps, with and without checkpointing: every buffer has the same bits.
    plain = stack(4, router=ROUTERS[name])
    replayed = copy.deepcopy(plain)
    for blocks, replay in ((plain, False), (replayed, True)):
        generator = torch.Generator().manual_seed(0)
        optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 6, DIM, generator=generator)
            loss_of(blocks, x, replay=replay).backward()
            optimizer.step()
    for key, value in plain.state_dict().items():
        assert torch.equal(replayed.state_dict()[key], value), key
    start = stack(4, router=ROUTERS[name]).state_dict()
    kept = [key for key in start if key.endswith(("statistics.dispersion", "selection.bias"))]
    assert any(not torch.equal(plain.state_dict()[key], start[key]) for key in kept)


def with_state_inside(block, y, *state):
    return block(y, RoutingState(*state))


def with_state_and_a_tensor(block, y, *state):
    y, after = block(y, RoutingState(*state))
    return y, y.mean(-1), after


def with_tensors_alone(block, y, *state):
    y, after = block(y, RoutingState(*state))
    return (y, *after)


@pytest.mark.usefixtures("no_native")
def test_reentrant_checkpoints_of_tensors_keep_the_gradient_of_the_auxiliary_loss():
    blocks = stack(3, router=ROUTERS["batch-previous"])
    other = copy.deepcopy(blocks)
    x = torch.randn(2, 6, DIM).requires_grad_()
    loss_of(blocks, x, replay=False).backward()
    y, state = x, begin(other, x)
    for block in other:
        call = partial(with_tensors_alone, block)
        y, *state = checkpoint(call, y, *state, use_reentrant=True)
    (y.square().mean() + state[3]).backward()
    for a, b in zip(blocks.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("returned", [with_state_inside, with_state_and_a_tensor])
def test_a_reentrant_checkpoint_that_would_drop_the_auxiliary_loss_is_refused(returned):
    # torch gives the tensors inside a tuple no gradient, and says nothing.
    block = stack(1, router=ROUTERS["batch-previous"])[0]
    x = torch.randn(2, 6, DIM).requires_grad_()
    call = partial(returned, block)
    y, *_, state = checkpoint(call, x, *begin([block], x), use_reentrant=True)
    assert not state.aux_loss.requires_grad
    with pytest.raises(UserError, match=r"drops the gradient of state.aux_loss.*=False"):
        (y.square().mean() + state.aux_loss).backward()


@pytest.mark.parametrize("uses", [False, True])
def test_a_reentrant_checkpoint_of_two_tensors_must_use_the_auxiliary_loss(uses):
    # A block may keep its loss in an attribute, where it has no gradient, or inside of a tensor.
    block = stack(1, router=ROUTERS["batch-previous"])[0]
    x = torch.randn(2, 6, DIM).requires_grad_()

    def two_tensors(y, *state):
        y, after = block(y, RoutingState(*state))
        return y, after.aux_loss[None] if uses else y.mean(-1)

    y, other = checkpoint(two_tensors, x, *begin([block], x), use_reentrant=True)
    loss = y.square().mean() + other.sum()
    if uses:
        loss.backward()
    else:
        with pytest.raises(UserError, match=r"drops the gradient of state.aux_loss.*=False"):
            loss.backward()


@pytest.mark.usefixtures("no_native")
def test_a_reentrant_checkpoint_may_hold_another_that_is_not():
    block = stack(1, router=ROUTERS["batch-previous"])[0]
    x = torch.randn(2, 6, DIM).requires_grad_()

    def inner(y, *state):
        y, after = block(y, RoutingState(*state))
        return y, after.aux_loss[None]

    def outer(*arguments):
        return checkpoint(inner, *arguments, use_reentrant=False)

    y, loss = inner(x, *begin([block], x))
    (wanted,) = torch.autograd.grad(y.square().mean() + loss.sum(), x)
    y, loss = checkpoint(outer, x, *begin([block], x), use_reentrant=True)
    (y.square().mean() + loss.sum()).backward()
    assert torch.equal(x.grad, wanted)


def test_a_reentrant_checkpoint_without_auxiliary_loss_may_hold_the_state_inside():
    moe = MoE(dim=DIM, hidden=8, num_experts=4, top_k=2, losses=LossConfig(balance=0.0))
    x = torch.randn(12, DIM).requires_grad_()
    state = RoutingState.identity(num_tokens=12, num_clusters=4, dim=DIM)
    y, _ = checkpoint(moe, x, state, use_reentrant=True)
    y.sum().backward()
    assert moe.router.embedding.grad.abs().sum() > 0


@pytest.mark.slow  # test_compiled.py and test_decoder.py compile the blocks of a model by default
@pytest.mark.parametrize(("name", "replay"), GRAPHS)
def test_four_compiled_blocks_share_two_graphs_and_equal_eager(fresh_compiler, name, replay):
    blocks = stack(4, router=ROUTERS[name])
    other = copy.deepcopy(blocks)
    wanted = two_in_flight(blocks, replay=False)
    counter = CompileCounterWithBackend("aot_eager")
    found = two_in_flight(Wrapped(other, counter), replay=replay)
    assert_same(found, wanted)
    assert counter.frame_count <= 2
    fold_statistics(blocks)
    fold_statistics(other)
    for key, value in blocks.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefix", "through-the-scale", "loss-free"])
def test_other_routers_compile_into_two_graphs_too(fresh_compiler, name):
    blocks = stack(4, router=ROUTERS[name])
    other = copy.deepcopy(blocks)
    counter = CompileCounterWithBackend("aot_eager")
    wanted = two_in_flight(blocks, replay=False)
    assert_same(two_in_flight(Wrapped(other, counter), replay=True), wanted)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_whole_checkpointed_model_compiles_into_one_graph(fresh_compiler, name):
    blocks = stack(2, router=ROUTERS[name])
    other = copy.deepcopy(blocks)
    x = torch.randn(2, 6, DIM)
    loss_of(blocks, x, replay=False).backward()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda tokens: loss_of(other, tokens, replay=True), fullgraph=True, backend=counter
    )
    compiled(x).backward()
    assert counter.frame_count == 1
    for a, b in zip(blocks.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    fold_statistics(blocks)
    fold_statistics(other)
    for key, value in blocks.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, msg=key)


@pytest.mark.slow
def test_a_masked_compiled_block_equals_eager(fresh_compiler):
    blocks = stack(2, router=ROUTERS["batch-previous"], capacity_factor=1.0)
    other = copy.deepcopy(blocks)
    x = torch.randn(2, 6, DIM)
    mask = torch.rand(2, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    wanted = loss_of(blocks, x, replay=False, mask=mask)
    found = loss_of(Wrapped(other, "aot_eager"), x, replay=False, mask=mask)
    torch.testing.assert_close(found, wanted)
    wanted.backward()
    found.backward()
    for a, b in zip(blocks.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("router", ["smoe", "adaptive"])
def test_hooks_may_bring_saved_tensors_back_with_other_strides(router: str) -> None:
    """A hook stores transposed copies, and returns them transposed back: the same values."""
    torch.manual_seed(0)
    moe = MoE(dim=8, hidden=8, num_experts=3, top_k=2, router=router)
    x = torch.randn(6, 8, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        y, state = moe(x)
        loss = y.square().sum() + state.aux_loss
        return list(torch.autograd.grad(loss, [x, *moe.parameters()]))

    def turned(one: torch.Tensor) -> torch.Tensor:
        return one.mT if one.dim() >= 2 else one

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: turned(one).contiguous(), turned):
        found = gradients()
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted)
