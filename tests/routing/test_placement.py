"""The layers that are adaptive: the paper's lists, to the layer."""

import pytest
import torch

from acmoe import (
    AdaptiveConfig,
    AdaptiveRouter,
    RandomConfig,
    SMoEConfig,
    UserError,
    adaptive_depths,
    create_model,
    list_models,
    plan_layers,
)

# The paper counts Switch's six layers from 1, and numbers Swin's nine MoE layers 2, 4, ..., 18.
SWITCH = {
    "full": [2, 3, 4, 5, 6],
    "skip-1": [3, 4, 5, 6],
    "skip-2": [4, 5, 6],
    "alternating": [2, 4, 6],
    "back-half": [4, 5, 6],
}
SWIN = {
    "full": [4, 6, 8, 10, 12, 14, 16, 18],
    "skip-1": [6, 8, 10, 12, 14, 16, 18],
    "skip-2": [8, 10, 12, 14, 16, 18],
    "alternating": [4, 8, 12, 16],
    "back-half": [10, 12, 14, 16, 18],
}


@pytest.mark.parametrize("placement", SWITCH)
def test_the_six_layers_of_switch_are_placed_as_the_paper_lists_them(placement):
    depths = adaptive_depths(placement, 6)
    assert [depth + 1 for depth in depths] == SWITCH[placement]


@pytest.mark.parametrize("placement", SWIN)
def test_the_nine_moe_layers_of_swin_are_placed_as_the_paper_lists_them(placement):
    depths = adaptive_depths(placement, 9)
    assert [2 * (depth + 1) for depth in depths] == SWIN[placement]


def test_a_list_of_depths_is_taken_as_it_is_sorted_and_once_each():
    assert adaptive_depths([4, 2, 4], 6) == (2, 4)
    assert adaptive_depths([], 6) == ()


@pytest.mark.parametrize("placement", SWITCH)
def test_the_first_layer_is_never_adaptive(placement):
    for layers in range(1, 12):
        assert 0 not in adaptive_depths(placement, layers)
    assert adaptive_depths(placement, 1) == ()


@pytest.mark.parametrize("config", [AdaptiveConfig(), RandomConfig()])
@pytest.mark.parametrize("placement", [*SWITCH, [1, 4], []])
def test_emitters_stand_exactly_before_adaptive_layers(config, placement):
    depths = adaptive_depths(placement, 6)
    placed = plan_layers(config, placement, 6)
    assert len(placed) == 6
    for depth, layer in enumerate(placed):
        assert layer.router is (config if depth in depths else config.base)
        assert layer.next_router is (config if depth + 1 in depths else None)


def test_other_routers_stand_everywhere_and_emit_nothing():
    for placed in plan_layers("cosine", "skip-2", 3):
        assert placed.router.name == "cosine"
        assert placed.next_router is None


@pytest.mark.parametrize("router", ["adaptive", "random"])
@pytest.mark.parametrize(
    ("placement", "layers", "fix"),
    [
        ("skip-2", 3, r"use placement='full', or router='smoe'"),
        ("skip-1", 2, r"use placement='full', or router='smoe'"),
        ("full", 1, r"use two MoE layers or more, or router='smoe'"),
        ("back-half", 1, r"use two MoE layers or more"),
    ],
)
def test_a_named_placement_without_an_adaptive_layer_is_refused(router, placement, layers, fix):
    message = rf"placement='{placement}' among num_layers={layers} MoE layers leaves none for .*"
    with pytest.raises(UserError, match=message + fix):
        plan_layers(router, placement, layers)
    assert [one.next_router for one in plan_layers(router, [], layers)] == [None] * layers


@pytest.mark.parametrize("name", list_models())
def test_every_model_of_the_library_has_adaptive_layers(name):
    with torch.device("meta"):
        model = create_model(name, router="adaptive")
    assert any(isinstance(module, AdaptiveRouter) for module in model.modules())


def test_plain_layers_of_an_adaptive_model_keep_its_base_router():
    config = AdaptiveConfig(base=SMoEConfig(bias=True))
    assert [layer.router for layer in plan_layers(config, "alternating", 4)] == [
        config.base,
        config,
        config.base,
        config,
    ]


@pytest.mark.parametrize(
    ("placement", "layers", "message"),
    [
        ("half", 6, r"placement='half' is unknown; choose one of full, skip-1.* or a list"),
        ("full", 0, r"num_layers=0; it must be at least 1"),
        ([0, 2], 6, r"placement holds depth 0; .* an adaptive one is at 1 to 5"),
        ([6], 6, r"placement holds depth 6; .* is at 1 to 5"),
        ([1.5], 6, r"placement holds depth 1.5"),
    ],
)
def test_a_placement_that_does_not_exist_is_refused(placement, layers, message):
    with pytest.raises(UserError, match=message):
        adaptive_depths(placement, layers)
    with pytest.raises(UserError, match=message):
        plan_layers("smoe", placement, layers)
