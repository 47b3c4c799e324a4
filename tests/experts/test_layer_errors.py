"""What cannot work is refused by the layer in one line that names the value and the fix."""

import pytest
import torch

import acmoe
from acmoe import (
    AdaptiveConfig,
    LossConfig,
    MoE,
    RoutingState,
    SoftConfig,
    SoftMoE,
    UserError,
    build_router,
)

SIZES = {"dim": 4, "hidden": 8, "num_experts": 3, "top_k": 2}


def other_router(**changes):
    sizes = {key: value for key, value in SIZES.items() if key != "hidden"}
    return build_router("smoe", **(sizes | changes))


BUILDS = [
    ({"router": "soft"}, r"router='soft' fills slots .*; use acmoe.SoftMoE"),
    ({"router": AdaptiveConfig(base=SoftConfig())}, r"use acmoe.SoftMoE"),
    ({"router": "gate"}, r"router='gate' is unknown; choose one of smoe, adaptive"),
    ({"top_k": 4}, r"top_k=4 exceeds num_experts=3; lower top_k"),
    ({"capacity_factor": 0.0}, r"capacity_factor=0.0; it must be positive, or None for dropless"),
    ({"capacity_factor": float("nan")}, r"capacity_factor=nan; it must be positive"),
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
    ({"router": "stable"}, r"vocab_size=None; .*give StableConfig\(vocab_size=...\)"),
    ({"losses": LossConfig(importance_load=0.1)}, r"importance_load=0.1.*noise above 0"),
]


@pytest.mark.parametrize(("options", "message"), BUILDS)
def test_a_layer_that_cannot_be_built_is_refused(options, message):
    with pytest.raises(UserError, match=message) as caught:
        MoE(**(SIZES | options))
    assert "\n" not in str(caught.value)


def fitting(**changes):
    return RoutingState.identity(**({"num_tokens": 6, "num_clusters": 3, "dim": 4} | changes))


CALLS = [
    ({"x": torch.zeros(6, 3)}, r"x has shape \(6, 3\); this layer takes \(tokens, 4\)"),
    ({"x": torch.zeros(4)}, r"x has shape \(4,\); this layer takes"),
    ({"token_mask": torch.ones(3, 2) > 0}, r"token_mask has shape \(3, 2\); .* needs \(6,\)"),
    ({"token_mask": torch.ones(6).int()}, r"token_mask has dtype torch.int32; pass a bool"),
    ({"state": fitting(num_tokens=7)}, r"assignment has shape \(7, 1\); 6 tokens .*identity"),
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


def test_a_layer_that_routes_by_token_id_asks_for_them():
    layer = MoE(**SIZES, router="hash")
    with pytest.raises(UserError, match=r"router='hash' routes by token id; pass token_ids"):
        layer(torch.zeros(6, 4), fitting())


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
