"""An adaptive router loads the weights of the plain one it wraps, and the plain one loads its."""

import pytest
import torch

import acmoe
from acmoe import (
    AdaptiveConfig,
    CosineConfig,
    MoE,
    RandomConfig,
    SMoEConfig,
    SoftConfig,
    SoftMoE,
    StableConfig,
    build_router,
)
from acmoe.lab.variants import VariantConfig

BASES = [SMoEConfig(bias=True, bias_balancing=0.1), CosineConfig(), StableConfig(vocab_size=10)]
WRAPPERS = {
    "running": AdaptiveConfig,
    "current": lambda base: AdaptiveConfig(base=base, statistics_of="current"),
    "random": RandomConfig,
}


def router_of(config, *, seed):
    torch.manual_seed(seed)
    return build_router(config, dim=6, num_experts=4, top_k=2)


def statistics_of(names):
    return [name for name in names if "statistics" in name]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
def test_weights_of_a_plain_router_load_into_an_adaptive_one_and_back(base, wrapper):
    plain, adaptive = router_of(base, seed=0), router_of(WRAPPERS[wrapper](base=base), seed=1)
    if base.name == "stable":
        plain.freeze()
    state = plain.state_dict()
    missing, unexpected = adaptive.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (statistics_of(adaptive.state_dict()), [])
    assert list(state) == list(plain.state_dict())  # the caller's dictionary is not touched
    found = adaptive.base.state_dict()
    assert list(found) == list(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())

    again = router_of(base, seed=2)
    missing, unexpected = again.load_state_dict(adaptive.state_dict(), strict=False)
    assert (missing, unexpected) == ([], statistics_of(adaptive.state_dict()))
    found = again.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_model_that_loads_a_plain_one_is_that_model_until_it_has_statistics():
    torch.manual_seed(0)
    plain = acmoe.create_model("switch-nano").eval()
    adaptive = acmoe.create_model("switch-nano", router="adaptive").eval()
    tokens = torch.randint(0, plain.config.vocab_size, (2, 8))
    wanted = plain(tokens).logits
    assert not torch.equal(adaptive(tokens).logits, wanted)
    missing, unexpected = adaptive.load_state_dict(plain.state_dict(), strict=False)
    assert missing == statistics_of(adaptive.state_dict())
    assert missing and unexpected == []
    assert torch.equal(adaptive(tokens).logits, wanted)


def test_a_strict_load_names_the_statistics_alone():
    layers = [MoE(dim=6, hidden=4, num_experts=4, top_k=2, router=r) for r in ("smoe", "adaptive")]
    plain, adaptive = layers
    with pytest.raises(RuntimeError, match=r"Missing key.*next_state\.statistics") as error:
        adaptive.load_state_dict(plain.state_dict())
    assert "router" not in str(error.value)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*next_state\.statistics") as error:
        plain.load_state_dict(adaptive.state_dict())
    assert "router" not in str(error.value)


def test_slots_of_a_soft_layer_load_into_an_adaptive_one():
    sizes = {"dim": 6, "hidden": 4, "num_experts": 4}
    plain = SoftMoE(**sizes)
    adaptive = SoftMoE(**sizes, router=AdaptiveConfig(base=SoftConfig(), mix=2))
    missing, unexpected = adaptive.load_state_dict(plain.state_dict(), strict=False)
    assert (missing, unexpected) == (statistics_of(adaptive.state_dict()), [])
    x = torch.randn(2, 5, 6)
    assert torch.equal(adaptive.eval()(x)[0], plain.eval()(x)[0])


def test_names_that_a_router_knows_are_left_as_they_are():
    config = VariantConfig(
        base=SMoEConfig(bias=True), center=True, statistics="running", statistics_of="current"
    )
    one, other = router_of(config, seed=0), router_of(config, seed=1)
    one.means.weight.fill_(3.0)
    other.load_state_dict(one.state_dict())
    found = other.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in one.state_dict().items())


def test_tensors_that_no_router_has_are_reported_under_their_own_names():
    plain, adaptive = router_of("smoe", seed=0), router_of("adaptive", seed=1)
    odd = torch.zeros(1)
    _, unexpected = adaptive.load_state_dict({**plain.state_dict(), "odd": odd}, strict=False)
    assert unexpected == ["odd"]
    state = {**adaptive.state_dict(), "base.odd": odd}
    assert plain.load_state_dict(state, strict=False).unexpected_keys == ["base.odd"]
