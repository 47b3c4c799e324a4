"""A state says how it was made; a router that cannot use it raises and names the fix.

T tokens, D features, C clusters.
"""

import copy
import pickle
from dataclasses import fields, replace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from acmoe import (
    AdaptiveConfig,
    MoE,
    RandomConfig,
    RoutingState,
    SMoEConfig,
    SoftConfig,
    SoftMoE,
    UserError,
    build_router,
    override_statistics,
)
from acmoe.lab.variants import VariantConfig
from acmoe.routing.origin import check_origin, new_origin, origin_codes

PAPER = AdaptiveConfig(statistics="batch")
CURRENT = AdaptiveConfig(statistics="batch", statistics_of="current")


def layer(router="smoe", **options):
    return MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=router, **options)


def pass_on(first, second):
    torch.manual_seed(0)
    x = torch.randn(12, 4)
    y, state = first(x)
    return second(x + y, state)


MISMATCHES = [
    (
        layer(),
        PAPER,
        r"without clusters, from a layer with next_router=None; build the layer",
    ),
    (
        layer(),
        CURRENT,
        r"next_router=AdaptiveConfig\(statistics='batch', statistics_of='cu",
    ),
    (layer(), RandomConfig(), r"router='random' got a state without clusters.*RandomConfig\(\)"),
    (layer(CURRENT), PAPER, r"statistics_of='previous' got a state without scales"),
    (layer(RandomConfig()), PAPER, r"statistics_of='previous' got a state without scales"),
    (
        layer(PAPER),
        replace(PAPER, measure="variance"),
        r"measured scales with measure='mad', this router reads measure='variance'",
    ),
    (
        layer(PAPER),
        replace(PAPER, eval_statistics="running", normalize="global"),
        r"normalize='cluster', eval_statistics='batch', this router reads normalize='global', eval",
    ),
    (layer(PAPER), replace(PAPER, detach=False), r"with detach=True, this router reads detach=Fa"),
    (layer(PAPER), replace(PAPER, strength=0.5), r"other options than this router \(strength\)"),
    (layer(PAPER), VariantConfig(statistics="batch", power=0.5), r"other options .*\(power\)"),
    (
        layer(replace(CURRENT, mix=2)),
        replace(CURRENT, mix=2, detach=False),
        r"detach=False here, and the layer before handed on detach=True",
    ),
]


@pytest.mark.parametrize(("first", "config", "message"), MISMATCHES)
def test_a_state_that_the_next_router_cannot_use_is_refused_with_the_fix(first, config, message):
    with pytest.raises(UserError, match=message) as caught:
        pass_on(first, layer(config))
    assert "\n" not in str(caught.value)
    assert "acmoe.MoEStack or acmoe.plan_layers" in str(caught.value)
    pass_on(
        layer(first.router.config, next_router=config)
        if first.router.mix == getattr(config, "mix", 1)
        else first,
        layer(config),
    )  # and the fix in the message works


FITTING = [
    (PAPER, PAPER),
    (CURRENT, CURRENT),
    (PAPER, CURRENT),  # the clusters are there, and the scale is not read
    (PAPER, RandomConfig()),
    (RandomConfig(), CURRENT),
    (PAPER, VariantConfig(statistics="batch")),  # with its defaults the same scale
    (PAPER, replace(PAPER, base=SMoEConfig(bias=True), scale_experts=True)),
    (PAPER, replace(PAPER, statistics_of="previous", momentum=0.5, eval_statistics="batch")),
    (PAPER, "smoe"),
    ("smoe", "cosine"),
]


@pytest.mark.parametrize(("first", "second"), FITTING)
def test_a_state_that_the_next_router_can_use_needs_nothing_said(first, second):
    pass_on(layer(first), layer(second))


@pytest.mark.parametrize("reader", [CURRENT, RandomConfig()])
def test_a_layer_whose_next_router_reads_no_scale_hands_ones_on(reader):
    """Those of a state that it was handed, if that state can hold nothing else."""
    x, ones = torch.randn(3, 4), torch.ones(8, 4)
    sizes = {"dim": 4, "hidden": 8, "num_experts": 8, "top_k": 1}
    first, second = MoE(**sizes, next_router=reader), MoE(**sizes, router=reader)
    state = first(x)[1]
    assert second(x, state)[1].scale is state.scale
    with torch.inference_mode():
        made_apart = first(x)[1]
    by_hand = state._replace(scale=2 * ones)
    learned = RoutingState(*state[:2], ones.clone().requires_grad_(), *state[3:])
    chosen = MoE(**sizes, next_router=replace(CURRENT, mean_over="chosen"))(x)[1]
    measured = MoE(**sizes, next_router=PAPER)(x)[1]
    assert 0 in chosen.scale  # three tokens choose three of eight experts
    for other in (state, by_hand, learned, made_apart, chosen, measured):
        found = second(x, other)[1].scale
        assert torch.equal(found, ones)
        assert not found.requires_grad and not found.is_inference()


@torch.no_grad()
def test_a_layer_that_hands_ones_on_compiles_in_one_graph():
    x, first, second = torch.randn(12, 4), layer(next_router=CURRENT), layer(CURRENT)
    state = first(x)[1]
    compiled = torch.compile(second, backend="eager", fullgraph=True)
    for found, wanted in zip(compiled(x, state)[1], second(x, state)[1], strict=True):
        torch.testing.assert_close(found, wanted)


def test_every_field_that_enters_the_scale_enters_the_codes():
    config = AdaptiveConfig(strength=1.0)
    inside = {
        "measure": "std",
        "statistics": "batch",
        "eval_statistics": "batch",
        "normalize": "feature",
        "strength": 2.0,
        "floor": 0.01,
        "eps": 0.1,
        "clamp": 3.0,
        "min_tokens": 5,
        "momentum": 0.5,
        "mean_over": "chosen",
        "mean_before_clamp": True,
        "statistics_group": "global",
    }
    codes = {name: replace(config, **{name: new}).scale_codes for name, new in inside.items()}
    assert len({config.scale_codes, *codes.values()}) == 1 + len(inside)
    outside = {"mix": 2, "scale_experts": True, "prior_tokens": 4.0, "base": SMoEConfig(bias=True)}
    for name, new in outside.items():
        assert replace(config, **{name: new}).scale_codes == config.scale_codes
    left = {one.name for one in fields(config)} - inside.keys() - outside.keys()
    assert left == {"statistics_of", "detach"}  # codes of their own
    assert replace(config, min_tokens=2, floor=1e-3).scale_codes == config.scale_codes


TRAVELS = {
    "cloned": lambda state: RoutingState(*(tensor.clone() for tensor in state)),
    "mapped": lambda state: pytree.tree_map(torch.clone, state),
    "moved": lambda state: RoutingState(*(tensor.to("meta") for tensor in state)),
    "pickled": lambda state: pickle.loads(pickle.dumps(state)),
    "copied": copy.deepcopy,
    "recomputed": lambda state: RoutingState(
        *checkpoint(lambda *tensors: tensors, *state, use_reentrant=False)
    ),
}


@pytest.mark.parametrize("way", TRAVELS)
def test_the_origin_survives_however_a_state_travels(way):
    with torch.no_grad():  # deepcopy takes leaves only
        _, state = layer(PAPER)(torch.randn(12, 4))
    found = TRAVELS[way](state)
    assert found.origin.shape == state.origin.shape == (0, *origin_codes(PAPER))
    assert found.origin.numel() == 0
    check_origin(found.origin, PAPER)  # on the meta device too: no value is read
    with pytest.raises(UserError, match="measure"):
        check_origin(found.origin, replace(PAPER, measure="std"))


def test_a_state_made_by_hand_fits_every_router():
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    tensors = (
        torch.tensor([[0], [1], [2], [0], [1], [2]]),
        torch.ones(6, 1),
        torch.rand(3, 4) + 0.5,
        torch.zeros(()),
    )
    for config in (PAPER, CURRENT, RandomConfig(), replace(PAPER, measure="gini")):
        router = build_router(config, dim=4, num_experts=3, top_k=2)
        for state in (RoutingState(*tensors), RoutingState(*tensors, torch.empty(0).int())):
            assert router(x, state).expert_ids.shape == (6, 2)


def test_replacing_a_part_of_a_state_says_what_it_then_is():
    x = torch.randn(6, 4)
    _, nothing = layer()(x)
    _, scales = layer(PAPER)(x)
    ids, ones = torch.zeros(6, 1, dtype=torch.int64), torch.ones(3, 4)
    assert nothing.origin.shape == (0, 0)
    # Clusters make a state without any one with clusters, for a router that measures its own.
    clusters = nothing._replace(assignment=ids)
    check_origin(clusters.origin, CURRENT)
    with pytest.raises(UserError, match="without scales"):
        check_origin(clusters.origin, PAPER)
    # A scale without clusters changes nothing, as no token has a cluster whose scale it reads.
    assert nothing._replace(scale=ones).origin.shape == (0, 0)
    # Whoever writes the scale of clusters vouches for it.
    assert scales._replace(scale=ones).origin.shape == (0,)
    assert nothing._replace(scale=ones, assignment=ids).origin.shape == (0,)
    assert scales._replace(assignment=ids).origin.shape == scales.origin.shape
    assert scales._replace(aux_loss=torch.ones(())).origin is scales.origin
    mine = new_origin(origin_codes(CURRENT), x)
    assert scales._replace(scale=ones, origin=mine).origin is mine


def test_an_override_on_both_sides_fits_and_on_one_side_does_not():
    layers = torch.nn.ModuleList([layer(PAPER), layer(PAPER)]).eval()
    with override_statistics(layers, measure="std", detach=False):
        pass_on(*layers)
    with (
        override_statistics(layers[1], measure="std"),
        pytest.raises(UserError, match="measure='mad', this router reads measure='std'"),
    ):
        pass_on(*layers)


def test_soft_layers_check_it_too():
    sizes = {"dim": 4, "hidden": 8, "num_experts": 3}
    adaptive = SoftMoE(**sizes, router=AdaptiveConfig(base=SoftConfig(), mix=2))
    with pytest.raises(UserError, match="without clusters"):
        pass_on(SoftMoE(**sizes), adaptive)
    pass_on(adaptive, adaptive)
