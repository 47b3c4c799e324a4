"""The layer refuses arguments that cannot work, in one line that names the value and the fix."""

import numpy as np
import pytest
import torch

import acmoe
from acmoe import (
    AdaptiveConfig,
    HashConfig,
    LossConfig,
    MoE,
    RandomConfig,
    RoutingState,
    SMoEConfig,
    SoftConfig,
    SoftMoE,
    ThresholdConfig,
    UserError,
    build_router,
)
from acmoe.experts.mlp import ExpertMLP
from acmoe.lab.variants import VariantConfig

SIZES = {"dim": 4, "hidden": 8, "num_experts": 3, "top_k": 2}


def other_router(**changes):
    sizes = {key: value for key, value in SIZES.items() if key != "hidden"}
    return build_router("smoe", **(sizes | changes))


BUILDS = [
    ({"router": "soft"}, r"router='soft' fills slots .*; use acmoe.SoftMoE"),
    ({"router": AdaptiveConfig(base=SoftConfig())}, r"use acmoe.SoftMoE"),
    ({"router": "gate"}, r"router='gate' is unknown; choose one of smoe, adaptive"),
    ({"router": {"name": "adaptive"}}, r"router=\{'name': 'adaptive'\} is no config of a router"),
    ({"router": AdaptiveConfig}, r"AdaptiveConfig'> is no config of a router; pass a name, a con"),
    ({"top_k": 4}, r"top_k=4 exceeds num_experts=3; lower top_k"),
    ({"capacity_factor": 0.0}, r"capacity_factor=0.0; it must be a positive number, or None"),
    ({"capacity_factor": float("nan")}, r"capacity_factor=nan; it must be a positive number"),
    ({"capacity_factor": True}, r"capacity_factor=True; it must be a positive number, or None"),
    ({"capacity_factor": np.True_}, r"capacity_factor=.*True.*; it must be a positive number"),
    ({"capacity_factor": np.ones(2)}, r"capacity_factor=array.*; it must be a positive number"),
    ({"next_router": "adaptive"}, r"next_router='adaptive'; pass the next router's AdaptiveConfig"),
    ({"router": other_router(dim=5)}, r"router has dim=5, the layer dim=4; build both with the"),
    ({"router": other_router(num_experts=5)}, r"router has num_experts=5, the layer num_experts=3"),
    ({"router": other_router(top_k=1)}, r"router has top_k=1, the layer top_k=2"),
    (
        {"router": other_router(), "losses": LossConfig(z=0.1)},
        r"losses=LossConfig.* beside a Router; give them to it instead",
    ),
    ({"activation": "tanh"}, r"activation='tanh' is unknown; choose one of relu, gelu, swiglu"),
    ({"dropout": -0.1}, r"dropout=-0.1; it must lie in \[0, 1\)"),
    ({"dropout": "a"}, r"dropout='a'; it must be a number"),
    ({"bias": "no"}, r"bias='no'; it must be true or false"),
    ({"bias": None}, r"bias=None; it must be true or false"),
    ({"router": "stable"}, r"vocab_size=None; .*give StableConfig\(vocab_size=...\)"),
    ({"losses": LossConfig(importance_load=0.1)}, r"importance_load=0.1.*noise above 0"),
    ({"losses": {"balance": 0.1}}, r"losses=\{'balance': 0.1\}; pass acmoe.LossConfig\(\.\.\.\)"),
    ({"top_k": 1.5}, r"top_k=1.5; it must be a whole number"),
    ({"top_k": True}, r"top_k=True; it must be a whole number"),
    ({"num_experts": "8"}, r"num_experts='8'; it must be a whole number"),
    ({"dim": 4.0}, r"dim=4.0; it must be a whole number"),
    ({"hidden": "8"}, r"hidden='8'; it must be a whole number"),
    ({"hidden": 0}, r"hidden=0; it must be at least 1"),
    ({"capacity_factor": "1"}, r"capacity_factor='1'; it must be a positive number, or None"),
]
CONFIGS = [
    (AdaptiveConfig, {"detach": "no"}, r"detach='no'; it must be true or false"),
    (AdaptiveConfig, {"detach": 1}, r"detach=1; it must be true or false"),
    (AdaptiveConfig, {"scale_experts": None}, r"scale_experts=None; it must be true or false"),
    (AdaptiveConfig, {"mix": 1.5}, r"mix=1.5; it must be a whole number"),
    (AdaptiveConfig, {"mix": True}, r"mix=True; it must be a whole number"),
    (AdaptiveConfig, {"floor": "0.1"}, r"floor='0.1'; it must be a number"),
    (AdaptiveConfig, {"strength": "1"}, r"strength='1'; it must be a number or none"),
    (AdaptiveConfig, {"momentum": float("nan")}, r"momentum=nan; it must lie in \[0, 1\)"),
    (AdaptiveConfig, {"eps": float("inf")}, r"eps=inf; it must be 0 or more, and finite"),
    (AdaptiveConfig, {"clamp": float("nan")}, r"clamp=nan; it must be positive and finite"),
    (VariantConfig, {"match": "yes"}, r"match='yes'; it must be true or false"),
    (RandomConfig, {"std": "0.5"}, r"std='0.5'; it must be a number"),
    (LossConfig, {"balance": "0.1"}, r"balance='0.1'; it must be a number"),
    (LossConfig, {"z": float("inf")}, r"z=inf; it must be 0 or more, and finite"),
    (SMoEConfig, {"bias": 0}, r"bias=0; it must be true or false"),
    (HashConfig, {"seed": 0.5}, r"seed=0.5; it must be a whole number"),
    (ThresholdConfig, {"threshold": float("nan")}, r"threshold=nan; a softmax affinity needs"),
    (SoftConfig, {"slots_per_expert": 1.0}, r"slots_per_expert=1.0; it must be a whole number"),
]


@pytest.mark.parametrize(("config", "options", "message"), CONFIGS)
def test_a_field_of_another_type_is_refused_when_the_config_is_made(config, options, message):
    with pytest.raises(UserError, match=message) as caught:
        config(**options)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    config = AdaptiveConfig(floor=np.float32(0.5), mix=np.int64(1), strength=2)
    assert config.scale_codes == AdaptiveConfig(floor=0.5, strength=2.0).scale_codes
    sizes = SIZES | {"num_experts": np.int32(3), "capacity_factor": np.float32(1.25)}
    MoE(**sizes, router=config)(torch.zeros(6, 4))


@pytest.mark.parametrize(("options", "message"), BUILDS)
def test_a_layer_that_cannot_be_built_is_refused(options, message):
    with pytest.raises(UserError, match=message) as caught:
        MoE(**(SIZES | options))
    assert "\n" not in str(caught.value)


def fitting(**changes):
    return RoutingState.identity(**({"num_tokens": 6, "num_clusters": 3, "dim": 4} | changes))


def jagged():
    return torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(4, 4)], layout=torch.jagged)


CALLS = [
    ({"x": torch.zeros(6, 3)}, r"x has shape \(6, 3\); this layer takes \(tokens, 4\)"),
    ({"x": torch.zeros(4)}, r"x has shape \(4,\); this layer takes"),
    ({"x": torch.zeros(6, 4).long()}, r"x has dtype torch.int64; pass floating-point hidden"),
    ({"x": torch.zeros(6, 4).cfloat()}, r"x has dtype torch.complex64; pass floating-point"),
    ({"x": torch.zeros(6, 4).to(torch.float8_e4m3fn)}, r"x has dtype .*e4m3fn; pass .* 16 bits"),
    ({"x": torch.zeros(6, 4).to_sparse()}, r"x has layout torch.sparse_coo; pass x.to_dense\(\)"),
    ({"x": np.zeros((6, 4))}, r"x is a ndarray; pass a torch tensor of hidden states"),
    ({"x": jagged()}, r"x is a nested tensor; pass .*token_mask"),
    ({"token_mask": torch.ones(3, 2) > 0}, r"token_mask has shape \(3, 2\); .* needs \(6,\)"),
    ({"token_mask": [True] * 6}, r"token_mask is a list; pass a bool tensor"),
    ({"token_mask": torch.ones(6).int()}, r"token_mask has dtype torch.int32; pass a bool"),
    ({"state": fitting(num_tokens=7)}, r"assignment has shape \(7, 1\); x has 6 tokens: pass"),
    ({"state": fitting(mix=2)}, r"assignment has shape \(6, 2\); 6 tokens and mix=1"),
    ({"state": fitting(num_clusters=4)}, r"state.scale has 4 clusters; this router has 3"),
    ({"state": fitting(dim=8)}, r"state.scale has 8 features; the tokens have 4"),
]


@pytest.mark.parametrize(("arguments", "message"), CALLS)
def test_tokens_that_do_not_fit_a_layer_are_refused(arguments, message):
    soft = AdaptiveConfig(base=SoftConfig())
    layers = [
        MoE(**SIZES, router="adaptive"),
        SoftMoE(dim=4, hidden=8, num_experts=3, router=soft),
    ]
    given = {"x": torch.zeros(6, 4), "state": fitting()} | arguments
    for layer in layers:
        with pytest.raises(UserError, match=message):
            layer(given["x"], given["state"], token_mask=given.get("token_mask"))


@pytest.mark.parametrize("router", ["smoe", "cosine", "threshold"])
def test_plain_layers_refuse_whole_numbers_which_experts_would_round_to_zero(router):
    with pytest.raises(UserError, match=r"x has dtype torch.int64; pass floating-point hidden"):
        MoE(**SIZES, router=router)(torch.ones(6, 4, dtype=torch.int64))


@pytest.mark.parametrize("router", ["smoe", "cosine", "threshold"])
def test_plain_layers_refuse_a_state_of_other_tokens_too(router):
    with pytest.raises(UserError, match=r"has shape \(7, 1\); x has 6 tokens: .* or none in"):
        MoE(**SIZES, router=router)(torch.zeros(6, 4), fitting(num_tokens=7))


@pytest.mark.parametrize("statistics", ["prefix", "sequence"])
def test_a_cache_of_another_batch_size_is_refused(statistics):
    layer = MoE(**SIZES, router=AdaptiveConfig(statistics=statistics)).eval()
    cache = layer.new_cache(2)
    with torch.no_grad():
        layer(torch.zeros(2, 3, 4), cache=cache)
        with pytest.raises(UserError, match=r"made for 2 sequences, and x has 3; .*new_cache\(3"):
            layer(torch.zeros(3, 1, 4), cache=cache)


def test_a_layer_that_routes_by_token_id_asks_for_them():
    layer = MoE(**SIZES, router="hash")
    with pytest.raises(UserError, match=r"router='hash' routes by token id; pass token_ids"):
        layer(torch.zeros(6, 4), fitting())
    with pytest.raises(UserError, match=r"token_ids has dtype torch.float32; router='hash' takes"):
        layer(torch.zeros(6, 4), token_ids=torch.zeros(6))


def test_old_names_still_work_for_one_version_and_warn() -> None:
    config = AdaptiveConfig(statistics="batch")
    options = {"dim": 4, "hidden": 8, "num_experts": 3, "top_k": 2}
    with pytest.warns(FutureWarning, match="emit= is now called next_router="):
        layer = MoE(**options, router="smoe", emit=config)
    assert layer.next_state.next_router is config
    with pytest.warns(FutureWarning, match="acmoe.place is now called acmoe.plan_layers"):
        assert acmoe.place("adaptive", "full", 3) == acmoe.plan_layers("adaptive", "full", 3)


def test_a_state_dict_of_version_0_1_is_read() -> None:
    layer = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=AdaptiveConfig())
    layer.next_state.statistics.dispersion.fill_(3.0)
    old = {name.replace("next_state.", "emitter."): t for name, t in layer.state_dict().items()}
    assert any("emitter." in name for name in old)
    twin = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=AdaptiveConfig())
    twin.load_state_dict(old)
    assert (twin.next_state.statistics.dispersion == 3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_that_was_rounded_on_its_way_is_refused(dtype):
    first, second = (MoE(**SIZES, router="adaptive") for _ in range(2))
    x = torch.randn(5, 4)
    _, state = first(x)
    cast = RoutingState(*(t.to(dtype) if t.is_floating_point() else t for t in state))
    with pytest.raises(UserError, match=r"state.scale arrives in .*: pass the state in float32"):
        second(x, cast)


@pytest.mark.parametrize("router", ["smoe", "adaptive"])
def test_what_is_no_state_is_refused(router):
    moe, x = MoE(**SIZES, router=router), torch.randn(5, 4)
    y, state = moe(x)
    with pytest.raises(UserError, match=r"state is a tuple; pass .* acmoe.RoutingState\(\*tens"):
        moe(x, tuple(state))
    with pytest.raises(UserError, match=r"state is a Tensor; pass the RoutingState"):
        moe(x, torch.ones(5, dtype=torch.bool))  # a mask in the wrong place
    with pytest.raises(UserError, match=r"x is a tuple; .* acmoe.MoEStack hands on and nn.Seq"):
        moe((y, state))


def test_the_experts_input_has_the_shape_of_the_tokens():
    """A longer one would have been cut to the routed tokens in silence."""
    moe, x = MoE(dim=4, hidden=4, num_experts=2, top_k=1), torch.randn(6, 4)
    y, _ = moe(x, expert_input=x.clone())
    assert torch.equal(y, moe(x)[0])
    for rows in (5, 7):
        with pytest.raises(UserError, match=rf"shape \({rows}, 4\), and x \(6, 4\); it must be x"):
            moe(x, expert_input=torch.randn(rows, 4))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.tensor(1.0), r"x has shape \(\); this layer takes \(tokens, 4\)"),
        (torch.zeros(4), r"x has shape \(4,\); this layer takes \(tokens, 4\)"),
        ([[0.0] * 4], r"x is a list; pass a torch tensor of hidden states"),
    ],
    ids=["number", "one token", "list"],
)
def test_layers_and_routers_without_a_state_refuse_the_same_tokens(x, message):
    router = build_router("adaptive", dim=4, num_experts=3, top_k=2, standalone=True)
    routing = router(torch.zeros(1, 4))
    soft = SoftMoE(dim=4, hidden=8, num_experts=3)
    for call in (MoE(**SIZES), soft, router, lambda x: router.next_state(x, routing)):
        with pytest.raises(UserError, match=message):
            call(x)


@pytest.mark.parametrize("router", ["smoe", "cosine", "expert-choice"])
def test_a_router_of_more_experts_than_the_layer_is_refused(router):
    """Its tokens for experts that are not there would have got an output of zeros."""
    layer = MoE(**SIZES, router=router)
    layer.router = build_router(router, dim=4, num_experts=5, top_k=2)
    with pytest.raises(UserError, match=r"among 5 experts, and the layer has num_experts=3; give"):
        layer(torch.randn(6, 4))


@pytest.mark.parametrize("kept", [2, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_another_number_of_experts_are_refused(kept, bias):
    """Rows of an expert without weights would have held whatever was in memory."""
    layer = MoE(**SIZES, bias=bias)
    layer.experts = ExpertMLP(dim=4, hidden=8, num_experts=kept, bias=bias)
    with pytest.raises(UserError, match=rf"sorted by 3 experts, and there are weights of {kept};"):
        layer(torch.randn(6, 4))


@pytest.mark.parametrize("cache", [(None, None), 5])
def test_a_cache_of_another_kind_is_named(cache):
    with pytest.raises(UserError, match=rf"cache is a {type(cache).__name__}; pass this layer's"):
        MoE(**SIZES)(torch.ones(1, 4), cache=cache)
