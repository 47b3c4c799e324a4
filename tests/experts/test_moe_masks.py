"""Padding changes nothing, whatever it holds.

B sequences, L tokens in each, D features.
"""

import math

import pytest
import torch
from moe_stack import DIM, WORDS, begin, stack

from acmoe import (
    AdaptiveConfig,
    CosineConfig,
    ExpertChoiceConfig,
    HashConfig,
    RandomConfig,
    SMoEConfig,
    StableConfig,
    ThresholdConfig,
)
from slow_cases import mostly_slow

ROUTERS = {
    "smoe": SMoEConfig(bias=True, bias_balancing=0.1),
    "cosine": CosineConfig(),
    "stable": StableConfig(vocab_size=WORDS),
    "threshold": ThresholdConfig(threshold=0.2, learnable=True),
    "hash": HashConfig(),
    "expert-choice": ExpertChoiceConfig(),
    "random": RandomConfig(),
    "batch": AdaptiveConfig(statistics="batch"),
    "batch-current": AdaptiveConfig(statistics="batch", statistics_of="current", detach=False),
    "running": AdaptiveConfig(statistics="running"),
    "prefix": AdaptiveConfig(statistics="prefix", mix=2),
    "sequence": AdaptiveConfig(statistics="sequence", measure="iqr"),
    "gini": AdaptiveConfig(statistics="batch", measure="gini", detach=False, mix=2),
    "std": AdaptiveConfig(statistics="batch", measure="std", detach=False, normalize="global"),
    "published": AdaptiveConfig.preset("reference-swin"),
}
MASK = torch.tensor(
    [
        [True, True, True, True, True, True, True],
        [False, False, True, True, True, True, False],
        [True, False, True, False, True, True, True],
        [False, False, False, False, False, False, False],
    ]
)
IDS = torch.arange(28).view(4, 7) % WORDS


def run(router, garbage, *, mask=MASK, capacity_factor=None):
    """Outputs, state, gradients and buffers of two blocks in training."""
    blocks = stack(2, router=ROUTERS[router], capacity_factor=capacity_factor)
    torch.manual_seed(1)
    x = torch.randn(4, 7, DIM)
    x[~mask] = garbage
    x.requires_grad_()
    ids = IDS.masked_fill(~mask, -1 if math.isnan(garbage) else 0)
    torch.manual_seed(2)
    y, state = x, begin(blocks, x)
    for block in blocks:
        # Norms stand outside: what they do with NaN is not the layer's doing.
        out, state = block.moe(y, state, token_mask=mask, token_ids=ids)
        y = y + out
        assert torch.equal(out[~mask], torch.zeros_like(out[~mask]))
    weight = torch.randn(4, 7, DIM, generator=torch.Generator().manual_seed(3))
    (y[mask] * weight[mask]).sum().add(state.aux_loss).backward()
    grads = [p.grad for p in blocks.parameters() if p.grad is not None]
    return {
        "y": y[mask],
        "assignment": state.assignment[mask.flatten()],
        "scale": state.scale,
        "aux_loss": state.aux_loss,
        "x.grad": x.grad,
        **{f"grad {i}": grad for i, grad in enumerate(grads)},
        **{f"buffer {name}": value.clone() for name, value in blocks.named_buffers()},
    }


@mostly_slow("capacity_factor", [None, 1.0], keep=(1,))
@pytest.mark.parametrize("router", ROUTERS)
def test_what_padding_holds_changes_no_bit_of_outputs_state_gradients_or_buffers(
    router, capacity_factor
):
    wanted = run(router, 0.0, capacity_factor=capacity_factor)
    assert (wanted["x.grad"][~MASK] == 0).all()
    for garbage in (1e30, math.inf, math.nan):
        found = run(router, garbage, capacity_factor=capacity_factor)
        for key, value in wanted.items():
            assert value.isfinite().all(), key
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("router", ROUTERS)
def test_padding_gives_what_the_same_tokens_give_without_it(router):
    # One sequence of seven with padding between, and its four tokens alone.
    blocks = stack(2, router=ROUTERS[router])
    if router == "published":
        blocks.eval()  # its training noise is drawn for every token, padding too
    real = torch.tensor([True, False, True, True, False, True, False])
    x = torch.randn(1, 7, DIM)
    results = []
    for mask, tokens, ids in ((real[None], x, IDS[:1]), (None, x[:, real], IDS[:1, real])):
        torch.manual_seed(2)
        y, state = tokens, begin(blocks, tokens)
        for block in blocks:
            y, state = block(y, state, mask, ids)
        if mask is not None:
            y, state = y[:, real], state._replace(assignment=state.assignment[real])
        results.append((y, state.assignment, state.scale, state.aux_loss))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("left", [0, 3])
def test_prefix_statistics_skip_padding_on_either_side(left):
    blocks = stack(2, router=ROUTERS["prefix"])
    x = torch.randn(1, 4, DIM)
    padded = torch.full((1, 7, DIM), 5.0)
    padded[:, left : left + 4] = x
    mask = torch.zeros(1, 7, dtype=torch.bool)
    mask[:, left : left + 4] = True
    outputs = []
    for tokens, token_mask in ((x, None), (padded, mask)):
        y, state = tokens, begin(blocks, tokens)
        for block in blocks:
            y, state = block(y, state, token_mask)
        outputs.append(y)
    torch.testing.assert_close(outputs[0], outputs[1][:, left : left + 4])


def test_a_call_of_padding_alone_is_zero_and_finite():
    for router in ROUTERS.values():
        blocks = stack(1, router=router, capacity_factor=1.25)
        x = torch.full((2, 3, DIM), math.nan, requires_grad=True)
        mask = torch.zeros(2, 3, dtype=torch.bool)
        ids = torch.zeros(2, 3, dtype=torch.int64)
        y, state = blocks[0].moe(x, begin(blocks, x), token_mask=mask, token_ids=ids)
        assert torch.equal(y, torch.zeros(2, 3, DIM))
        assert state.aux_loss == 0
        assert state.scale.isfinite().all()
        (y.sum() + state.aux_loss).backward()
        assert torch.equal(x.grad, torch.zeros_like(x))
