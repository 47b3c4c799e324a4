"""Token by token with a cache: the full forward again, where the statistics are causal.

B sequences, L tokens in each, D features.
"""

import pytest
import torch
from moe_stack import DIM, EXPERTS, begin, stack

from acmoe import AdaptiveConfig, MoE, UserError
from acmoe.routing.statistics.cache import LayerCache
from slow_cases import mostly_slow

CAUSAL = {
    "plain": "smoe",
    "running": AdaptiveConfig(statistics="running"),
    "running-current": AdaptiveConfig(statistics="running", statistics_of="current", mix=2),
    "prefix": AdaptiveConfig(statistics="prefix"),
    "prefix-variance": AdaptiveConfig(statistics="prefix", measure="variance", mix=2),
    "prefix-std": AdaptiveConfig(statistics="prefix", measure="std", prior_tokens=0.0),
    "prefix-in-evaluation": AdaptiveConfig(statistics="running", eval_statistics="prefix"),
}


def caches(blocks, sequences):
    return [block.moe.new_cache(sequences, dtype=torch.float64) for block in blocks]


def forward(blocks, x, slots=None, mask=None):
    """Outputs, and the expert ids of every layer."""
    y, state, ids = x, begin(blocks, x), []
    for depth, block in enumerate(blocks):
        routing = []
        handle = block.moe.next_state.register_forward_pre_hook(
            lambda module, arguments, found=routing: found.append(arguments[1])
        )
        y, state = block(y, state, mask, cache=None if slots is None else slots[depth])
        handle.remove()
        ids.append(routing[0].expert_ids.view(*x.shape[:2], -1))
    return y, torch.stack(ids, dim=2)


@mostly_slow("prefill", [1, 4], keep=(1,))
@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_decoding_token_by_token_equals_the_full_forward(name, prefill):
    blocks = stack(3, router=CAUSAL[name]).double().eval()
    x = torch.randn(2, 10, DIM, dtype=torch.float64)
    wanted, wanted_ids = forward(blocks, x)
    slots = caches(blocks, 2)
    parts = [x[:, :prefill], *x[:, prefill:].split(1, dim=1)]
    found = [forward(blocks, part, slots) for part in parts]
    torch.testing.assert_close(
        torch.cat([y for y, _ in found], dim=1), wanted, rtol=1e-10, atol=1e-10
    )
    assert torch.equal(torch.cat([ids for _, ids in found], dim=1), wanted_ids)


@torch.no_grad()
def test_prompts_padded_on_the_left_decode_as_each_alone():
    blocks = stack(3, router=AdaptiveConfig(statistics="prefix")).double().eval()
    x = torch.randn(2, 8, DIM, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, :3] = False
    slots = caches(blocks, 2)
    forward(blocks, x[:, :5], slots, mask)
    together = [forward(blocks, part, slots)[0] for part in x[:, 5:].split(1, dim=1)]
    together = torch.cat(together, dim=1)
    torch.testing.assert_close(together[0], forward(blocks, x[:1])[0][0, 5:])
    torch.testing.assert_close(together[1], forward(blocks, x[1:, 3:])[0][0, 2:])


@pytest.mark.parametrize(
    "config",
    [
        AdaptiveConfig(statistics="batch"),
        AdaptiveConfig(statistics="batch", statistics_of="current"),
        AdaptiveConfig(statistics="sequence"),
    ],
    ids=["batch", "batch-current", "sequence"],
)
@torch.no_grad()
def test_batch_and_sequence_decoding_read_the_scale_of_the_prompt(config):
    blocks = stack(2, router=config).double().eval()
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    slots = caches(blocks, 2)
    forward(blocks, x[:, :6], slots)
    kept = [slot for layer in slots for slot in layer if slot is not None]
    assert all(slot.filled for slot in kept)
    before = [slot.scale.clone() for slot in kept]
    found, _ = forward(blocks, x[:, 6:], slots)
    for slot, scale in zip(kept, before, strict=True):
        assert torch.equal(slot.scale, scale)

    # By hand: the last token through both layers, the second one with the prompt's scale.
    first, second = blocks
    y, state = first(x[:, 6:], begin(blocks, x[:, 6:]))
    if config.reads == "previous":
        # The next_state of the first layer kept the prompt's scale.
        state = state._replace(scale=slots[0].next_state.scale)
        expected, _ = second(y, state)
    else:
        scale = slots[1].router.scale
        own = (
            scale[state.assignment[:, 0]]
            if scale.dim() == 2
            else torch.stack([scale[b, state.assignment[b, 0]] for b in range(2)])
        )
        h = second.norm(y)
        routing = second.moe.router.base(h * own[:, None], state)
        out = torch.zeros(2, DIM, dtype=torch.float64)
        experts = second.moe.experts
        for b in range(2):
            for e, gate in zip(routing.expert_ids[b], routing.gate[b], strict=True):
                hidden = torch.relu(experts.up[e] @ h[b, 0] + experts.up_bias[e])
                out[b] += gate * (experts.down[e] @ hidden + experts.down_bias[e])
        expected = y + out[:, None]
    torch.testing.assert_close(found, expected)


def test_running_statistics_need_no_slot():
    moe = MoE(dim=DIM, hidden=4, num_experts=EXPERTS, top_k=1, router="adaptive").eval()
    assert moe.new_cache(3) == LayerCache(None, None)


def test_a_cache_is_refused_while_gradients_are_recorded():
    for config in (AdaptiveConfig(statistics="prefix"), AdaptiveConfig(statistics="batch")):
        blocks = stack(1, router=config).eval()
        x = torch.randn(1, 3, DIM, requires_grad=True)
        slot = blocks[0].moe.new_cache(1)
        with pytest.raises(UserError, match=r"cache was passed while gradients .* torch.no_grad"):
            blocks[0](x, begin(blocks, x), cache=slot)
        with torch.no_grad():
            blocks[0](x, begin(blocks, x), cache=slot)


def test_a_cache_made_for_training_statistics_is_refused_where_evaluation_uses_others():
    config = AdaptiveConfig(statistics="running", eval_statistics="prefix")
    moe = stack(1, router=config)[0].moe
    with pytest.raises(UserError, match=r"statistics='running'.*'prefix'; call eval\(\) first"):
        moe.new_cache(1)
    assert moe.eval().new_cache(1).router is not None
