"""Other statistics for the length of an evaluation or an attack, and what cannot be asked for.

T tokens, D features, C clusters.
"""

import pytest
import torch
from filled_layers import filled_layer
from torch import nn

from acmoe import AdaptiveConfig, MoE, RoutingState, SMoEConfig, UserError, override_statistics
from acmoe.routing.statistics import ClusterStatistics


@pytest.mark.parametrize("statistics_of", ["previous", "current"])
def test_override_changes_every_config_inside_and_restores_them_after(statistics_of):
    config = AdaptiveConfig(statistics="batch", statistics_of=statistics_of)
    model = nn.ModuleList(
        MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=config) for _ in range(2)
    ).eval()

    def configs():
        return [m.config for m in model.modules() if isinstance(m, ClusterStatistics)]

    assert len(configs()) == 2
    assert not model[0].router.causal
    with override_statistics(model, eval_statistics="running", detach=False):
        assert all(c.eval_statistics == "running" and not c.detach for c in configs())
        assert model[0].router.causal  # what the router says of itself follows
        assert not model[0].next_state.next_router.detach
    assert configs() == [config, config]
    assert model[0].router.config is config
    assert model[0].next_state.next_router is config
    with pytest.raises(KeyError), override_statistics(model, detach=False):
        raise KeyError
    assert configs() == [config, config]


def test_override_decides_which_statistics_are_used():
    moe = filled_layer().eval()
    x = torch.randn(30, 4)
    state = RoutingState.identity(num_tokens=30, num_clusters=3, dim=4)
    running = moe(x, state)[1].scale
    with override_statistics(moe, eval_statistics="batch"):
        batch = moe(x, state)[1].scale
    with override_statistics(moe, eval_statistics="batch", measure="std"):
        std = moe(x, state)[1].scale
        saved = moe.state_dict()
    filled_layer().load_state_dict(saved)  # the averages keep the name of their measure
    assert not torch.equal(running, batch) and not torch.equal(batch, std)
    assert torch.equal(moe(x, state)[1].scale, running)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_statistics": "prefix"}, r"'prefix'.*current.*built for the previous one"),
        ({"statistics_of": "current"}, r"previous one; build it with statistics_of=.current."),
        ({"measure": "mode"}, r"measure='mode' is unknown"),
        ({"measure": "std"}, r"measure='std' cannot be read from running averages.*as 'mad'"),
        (
            {"measure": "std", "eval_statistics": "batch"},
            r"measure='std' in training mode would enter running averages of 'mad'",
        ),
        ({"mix": 2}, r"mix=2 cannot be overridden; base, mix, scale_experts are fixed"),
        ({"scale_experts": True}, r"scale_experts=True cannot be overridden"),
        ({"base": SMoEConfig(bias=True)}, r"base=.* cannot be overridden"),
        ({"moment": 0.5}, r"moment=0.5 cannot be overridden.*field of AdaptiveConfig"),
    ],
)
def test_override_refuses_what_the_model_was_not_built_for(changes, message):
    moe = filled_layer()
    before = moe.next_state.statistics.config
    with pytest.raises(ValueError, match=message), override_statistics(moe, **changes):
        pytest.fail("the override was accepted")
    assert moe.next_state.statistics.config is before
    assert moe.router.config is before


def test_override_refuses_a_model_without_adaptive_layers():
    plain = MoE(dim=4, hidden=8, num_experts=3, top_k=2)
    message = r"detach cannot be overridden: the model has no adaptive layer; leave .* out"
    with pytest.raises(UserError, match=message), override_statistics(plain, detach=False):
        pytest.fail("the override was accepted")
