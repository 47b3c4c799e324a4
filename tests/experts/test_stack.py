"""`MoEStack` passes the state through blocks that know nothing of it.

B sequences, L tokens in each, D features.
"""

import copy
import threading

import pytest
import torch
from stacked_blocks import OTHER, PAPER, Block, D, by_hand, gradients, moe, paper_layout
from torch import nn
from torch.utils.checkpoint import checkpoint

from acmoe import (
    AdaptiveConfig,
    MoEFFN,
    MoEStack,
    RandomConfig,
    SoftConfig,
    SoftMoE,
    UserError,
)


def test_a_stack_is_the_loop_by_hand_with_every_layer_planned():
    stack = paper_layout()
    x = torch.randn(2, 9, D)
    y, state = stack(x)
    wanted, after = by_hand(stack, x)
    assert torch.equal(y, wanted)
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    planned = [layer.next_state.next_router for layer in stack.moe_layers()]
    assert planned == [PAPER, OTHER, None]
    # The adaptive layers are not plain: without M another output.
    layers = list(stack.moe_layers())
    _, handed = layers[0](x)
    assert not torch.equal(handed.scale, torch.ones_like(handed.scale))
    assert not torch.equal(layers[1](x, handed)[0], layers[1](x)[0])
    assert len(stack) == 5 and stack[4] is list(stack)[-1]


def test_layers_without_blocks_and_stacks_in_stacks_take_the_state_as_an_argument():
    torch.manual_seed(0)
    inner = MoEStack(moe(PAPER), moe(PAPER))
    assert [layer.next_state.next_router for layer in inner.moe_layers()] == [PAPER, None]
    stack = MoEStack(moe(), inner, Block(OTHER))
    routers = [layer.next_state.next_router for layer in stack.moe_layers()]
    assert routers == [PAPER, PAPER, OTHER, None]  # the inner stack is told what follows it
    x = torch.randn(12, D)
    y, state = x, None
    for layer in list(stack.moe_layers())[:3]:
        y, state = layer(y, state)
    block = stack[2]
    last, state = block.mlp.moe(block.norm(y), state)
    found, after = stack(x)
    assert torch.equal(found, y + last)
    assert torch.equal(after.aux_loss, state.aux_loss)


def test_soft_layers_and_a_mask_pass_through():
    torch.manual_seed(0)
    soft = AdaptiveConfig(base=SoftConfig(), statistics="batch", mix=2)
    sizes = {"dim": D, "hidden": 8, "num_experts": 4}
    stack = MoEStack(MoEFFN(SoftMoE(**sizes)), SoftMoE(**sizes, router=soft), MoEFFN(moe(PAPER)))
    x = torch.randn(2, 7, D)
    mask = torch.arange(14).view(2, 7) % 4 > 0
    y, _ = stack(x, token_mask=mask)
    changed = torch.where(mask[..., None], x, 100.0)
    assert torch.equal(stack(changed, token_mask=mask)[0], y)
    assert not y[~mask].any()


def test_a_state_from_before_and_for_after_the_stack():
    torch.manual_seed(0)
    first = moe(next_router=PAPER)
    stack = MoEStack(Block(PAPER), Block(PAPER, next_router=OTHER))
    x = torch.randn(8, D)
    _, state = first(x)
    y, after = stack(x, state)
    assert not torch.equal(y, stack(x)[0])
    moe(OTHER)(y, after)  # what was given to the last layer stays
    with pytest.raises(UserError, match="without clusters"):
        moe(OTHER)(y, MoEStack(Block(PAPER))(x)[1])


def test_other_arguments_go_to_the_blocks():
    class Scaled(Block):
        def forward(self, x, factor):
            return x + factor * self.mlp(self.norm(x))

    torch.manual_seed(0)
    stack = MoEStack(Scaled(PAPER), moe(PAPER))
    x = torch.randn(5, D)
    y, _ = stack(x, factor=0.0)
    wanted = stack[1](x, stack[0].mlp.moe(stack[0].norm(x))[1])
    assert torch.equal(y, wanted[0])


@pytest.mark.usefixtures("no_native")
@pytest.mark.parametrize("router", [PAPER, AdaptiveConfig(), RandomConfig()], ids=lambda c: c.name)
def test_two_checkpointed_forwards_in_flight_give_the_gradients_of_plain_eager(router):
    torch.manual_seed(0)
    plain = MoEStack(Block("smoe"), Block(router), nn.Linear(D, D), Block(router))
    replayed = copy.deepcopy(plain)
    replayed.checkpoint = True
    found = []
    for stack in (plain, replayed):
        torch.manual_seed(1)
        loss = 0.0
        for x in torch.randn(2, 2, 9, D):
            y, state = stack(x)
            loss = loss * -0.5 + y.square().mean() + state.aux_loss
        found.append(gradients(stack, loss))
    assert len(found[0]) == len(found[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for key, value in plain.state_dict().items():
        assert torch.equal(replayed.state_dict()[key], value)


class Meeting(nn.Module):
    """Lets every thread wait here for the others."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier = barrier

    def forward(self, x):
        self.barrier.wait(timeout=30)
        return x


def test_two_threads_see_their_own_state():
    torch.manual_seed(0)
    barrier = threading.Barrier(2)
    blocks = [
        nn.Sequential(Meeting(barrier), MoEFFN(moe(PAPER)), Meeting(barrier)) for _ in range(3)
    ]
    stack = MoEStack(blocks).eval()
    inputs = torch.randn(2, 9, D)
    found = [None, None]

    def run(index):
        found[index] = stack(inputs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, (y, state) in zip(inputs, found, strict=True):
        after = None
        for block in blocks:
            x, after = block[1].moe(x, after)
        assert torch.equal(y, x)
        assert torch.equal(state.assignment, after.assignment)


def test_a_copy_is_independent_and_loads_what_was_saved():
    stack = paper_layout()
    x = torch.randn(2, 9, D)
    twin = copy.deepcopy(stack)
    assert torch.equal(twin(x)[0], stack(x)[0])
    with torch.no_grad():
        twin[0].mlp.moe.experts.up.add_(1.0)
    assert not torch.equal(twin(x)[0], stack(x)[0])
    other = paper_layout()
    other.load_state_dict(stack.state_dict())
    assert torch.equal(other(x)[0], stack(x)[0])


class Forgetful(Block):
    def forward(self, x):
        return x


class Answering(Block):
    def forward(self, x):
        return super().forward(x), None


class Checkpointing(Block):
    def forward(self, x):
        return x + checkpoint(self.mlp, self.norm(x), use_reentrant=False)


class Bare(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def test_what_would_lose_the_state_raises_and_names_the_fix():
    x = torch.randn(5, D)
    with pytest.raises(UserError, match=r"no acmoe.MoEStack passes it a routing state; call the"):
        Block(PAPER)(x)
    with pytest.raises(UserError, match=r"Forgetful holds 1 MoEFFN and did not call 1 of them"):
        MoEStack(Block(PAPER), Forgetful(PAPER))(x)
    with pytest.raises(UserError, match=r"Answering returned tuple; .* the hidden states alone"):
        MoEStack(Answering(PAPER))(x)
    for inner in (moe(PAPER), MoEStack(moe(PAPER))):
        with pytest.raises(UserError, match=r"inside a block .* wrap an acmoe.MoE in acmoe.MoEFFN"):
            MoEStack(Bare(inner))
    with pytest.raises(UserError, match=r"MoEStack called no MoE layer"):
        MoEStack(nn.Linear(D, D))(x)
    with pytest.raises(UserError, match=r"MoEStack got str; pass modules"):
        MoEStack(["block"])
    with pytest.raises(UserError, match=r"MoEFFN got Linear and \[\]; pass an acmoe.MoE alone"):
        MoEFFN(nn.Linear(D, D))
    y, state = MoEStack(Checkpointing(PAPER))(x)
    with pytest.raises(UserError, match=r"use MoEStack\(\.\.\., checkpoint=True\)"):
        (y.sum() + state.aux_loss).backward()
    Block(PAPER)  # and no context is left behind by an error
    with pytest.raises(UserError, match=r"no acmoe\.MoEStack"):
        Block(PAPER)(x)


def test_a_next_router_that_was_given_is_kept_or_refused():
    MoEStack(Block("smoe", next_router=PAPER), Block(PAPER))
    with pytest.raises(UserError, match=r"with next_router=None, and the next router needs Adapt"):
        MoEStack(Block("smoe", next_router=None), Block(PAPER))
    shared = Block("smoe")
    MoEStack(shared, Block(PAPER))
    with pytest.raises(UserError, match=r"planned before, with next_router=.*leave it out"):
        MoEStack(shared, Block(OTHER))


def test_a_layer_that_occurs_twice_computes_for_the_adaptive_one_behind_it():
    torch.manual_seed(0)
    shared, last = Block("smoe"), Block(PAPER)
    stack = MoEStack(shared, shared, last)
    assert shared.mlp.moe.next_state.next_router == PAPER
    x = torch.randn(9, D)
    z = shared.norm(x)
    y, state = shared.mlp.moe(z)
    y2, state = shared.mlp.moe(shared.norm(x + y), state)
    y3, _ = last.mlp.moe(last.norm(x + y + y2), state)
    assert torch.equal(stack(x)[0], x + y + y2 + y3)


def test_new_statistics_go_where_the_layer_is():
    with torch.device("meta"):
        blocks = [Block("smoe"), Block(AdaptiveConfig())]
    blocks[0].eval()
    MoEStack(blocks)
    statistics = blocks[0].mlp.moe.next_state.statistics
    assert statistics.dispersion.is_meta
    assert not statistics.training
