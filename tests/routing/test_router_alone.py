"""The router without an MoE layer around it: the first state, and the state for the next router."""

import pytest
import torch

from acmoe import AdaptiveConfig, MoE, RoutingState, UserError, build_router, fold_statistics

SIZES = {"dim": 6, "num_experts": 4, "top_k": 2}
CONFIGS = [
    "smoe",
    "cosine",
    "expert-choice",
    "random",
    "metric",
    "threshold",
    AdaptiveConfig(statistics="batch"),
    AdaptiveConfig(statistics="batch", mix=2),
    AdaptiveConfig(statistics="prefix", mix=3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_state_is_the_identity(config, dtype):
    torch.manual_seed(0)
    moe = MoE(**SIZES, hidden=8, router=config).to(dtype)
    x = torch.randn(2, 5, 6, dtype=dtype)
    identity = RoutingState.identity(
        num_tokens=10, num_clusters=4, dim=6, mix=moe.router.mix, dtype=dtype
    )
    y, state = moe(x, identity)
    for arguments in ((x,), (x, None)):
        found, after = moe(*arguments)
        assert torch.equal(found, y)
        assert [tensor.dtype for tensor in after] == [tensor.dtype for tensor in state]
        assert torch.equal(after.assignment, state.assignment)
    assert torch.equal(moe.router(x).affinity, moe.router(x, identity).affinity)


def test_a_router_alone_hands_on_what_its_layer_would():
    torch.manual_seed(0)
    config = AdaptiveConfig(statistics="batch", measure="variance", mix=2)
    alone = [build_router(config, **SIZES, standalone=True) for _ in range(2)]
    inside = [MoE(**SIZES, hidden=8, router=config) for _ in range(2)]
    for router, moe in zip(alone, inside, strict=True):
        router.load_state_dict(moe.router.state_dict(), strict=False)
    x = torch.randn(2, 9, 6)
    mask = torch.arange(18).view(2, 9) % 5 > 0
    _, wanted = inside[0](x, token_mask=mask)
    state = alone[0].next_state(x, alone[0](x, token_mask=mask), token_mask=mask)
    for found, tensor in zip(state, wanted, strict=True):
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)
    assert not torch.equal(state.scale, torch.ones_like(state.scale))
    found, wanted = alone[1](x, state), inside[1].router(x, wanted)
    assert torch.equal(found.affinity, wanted.affinity)
    assert not torch.equal(found.affinity, alone[1](x).affinity)  # it is not the plain router


def test_running_statistics_of_a_router_alone_move_and_are_saved():
    torch.manual_seed(0)
    router = build_router("adaptive", **SIZES, standalone=True)
    x = torch.randn(40, 6)
    router.next_state(x, router(x))
    fold_statistics(router)
    saved = router.state_dict()
    assert saved["next_layer.statistics.weight"].sum() > 0
    twin = build_router("adaptive", **SIZES, standalone=True)
    twin.load_state_dict(saved)
    for one in (router, twin):
        one.eval()
    assert torch.equal(twin.next_state(x, twin(x)).scale, router.next_state(x, router(x)).scale)


def test_a_plain_router_alone_measures_for_the_adaptive_one_behind_it():
    config = AdaptiveConfig(statistics="batch")
    first = build_router("smoe", **SIZES, standalone=True, next_router=config)
    x = torch.randn(30, 6)
    state = first.next_state(x, first(x))
    second = build_router(config, **SIZES)
    assert not torch.equal(second(x, state).affinity, second(x).affinity)
    last = build_router("smoe", **SIZES, standalone=True)
    with pytest.raises(UserError, match="without clusters"):
        second(x, last.next_state(x, last(x)))


@pytest.mark.parametrize("reads", ["previous", "current"])
def test_a_state_is_of_the_tokens_that_were_routed(reads):
    router = build_router(AdaptiveConfig(statistics_of=reads), **SIZES, standalone=True)
    x = torch.randn(2, 5, 6)
    routing = router(x)
    state = router.next_state(x, routing)
    with pytest.raises(UserError, match="routing is of 10 tokens, and x has 5; pass the x"):
        router.next_state(x[:1], routing)
    with pytest.raises(UserError, match=r"state.assignment has shape \(10, 1\); x has 5 tokens"):
        router.next_state(x[:1], router(x[:1]), state)
    with pytest.raises(UserError, match=r"routing is a Tensor; pass what router\(x, state\) gave"):
        router.next_state(x, routing.affinity)


def test_half_a_state_is_never_handed_on():
    x = torch.randn(3, 6)
    router = build_router("adaptive", **SIZES)
    with pytest.raises(UserError, match=r"build_router\(\.\.\., standalone=True\)"):
        router.next_state(x, router(x))
    assert not any("next_layer" in name for name in router.state_dict())
    with pytest.raises(UserError, match=r"next_router=.* needs standalone=True"):
        build_router("smoe", **SIZES, next_router=AdaptiveConfig())
    with pytest.raises(UserError, match="beside a soft router"):
        build_router("soft", **SIZES, standalone=True)
    alone = build_router("adaptive", **SIZES, standalone=True)
    with pytest.raises(UserError, match=r"standalone=True, and acmoe.MoE computes"):
        MoE(**SIZES, hidden=8, router=alone)
