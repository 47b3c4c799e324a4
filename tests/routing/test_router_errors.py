"""Routers refuse arguments that cannot work, in one line that names the value and the fix."""

import pytest
import torch

from acmoe import (
    AdaptiveConfig,
    CosineConfig,
    ExpertChoiceConfig,
    HashConfig,
    LossConfig,
    RandomConfig,
    Router,
    RoutingState,
    SMoEConfig,
    SoftConfig,
    StableConfig,
    ThresholdConfig,
    UserError,
    build_router,
)

WITH_PREFIX = {"statistics": "prefix"}
CONFIGS = [
    (AdaptiveConfig, {"measure": "range"}, r"measure='range' is unknown; choose one of mad, var"),
    (
        AdaptiveConfig,
        {"statistics": "epoch"},
        r"statistics='epoch' is unknown; choose one of ba",
    ),
    (AdaptiveConfig, {"eval_statistics": "x"}, r"eval_statistics='x' is unknown"),
    (
        AdaptiveConfig,
        {"statistics_of": "next"},
        r"statistics_of='next' is unknown; .*previous",
    ),
    (AdaptiveConfig, {"normalize": "row"}, r"normalize='row' is unknown; .*cluster, feature, glob"),
    (AdaptiveConfig, {"strength": 0.0}, r"strength=0.0; it must be positive and finite"),
    (AdaptiveConfig, {"strength": -1.0}, r"strength=-1.0; it must be positive"),
    (AdaptiveConfig, {"strength": float("inf")}, r"strength=inf; it must be positive and finite"),
    (AdaptiveConfig, {"mix": 0}, r"mix=0; it must be at least 1"),
    (AdaptiveConfig, {"floor": -0.1}, r"floor=-0.1; it must be 0 or more"),
    (AdaptiveConfig, {"floor": 0.0}, r"floor=0 and eps=0 divide by a zero dispersion"),
    (AdaptiveConfig, {"min_tokens": 0}, r"min_tokens=0 takes 1/s of empty clusters; .*eps > 0"),
    (AdaptiveConfig, {"min_tokens": -1}, r"min_tokens=-1; it must be 0 or more"),
    (AdaptiveConfig, {"clamp": 0.0}, r"clamp=0.0; it must be positive"),
    (AdaptiveConfig, {"momentum": 1.0}, r"momentum=1.0; it must lie in \[0, 1\)"),
    (AdaptiveConfig, {"prior_tokens": -1.0}, r"prior_tokens=-1.0; it must be 0 or more"),
    (AdaptiveConfig, {"base": HashConfig()}, r"base=HashConfig.* cannot be rescaled; choose"),
    (AdaptiveConfig, {"base": "smoe"}, r"base='smoe' cannot be rescaled; choose a config"),
    (AdaptiveConfig, {"base": AdaptiveConfig()}, r"base=AdaptiveConfig.* cannot be rescaled"),
    (AdaptiveConfig, WITH_PREFIX | {"measure": "gini"}, r"measure='gini' has no causal form.*mad"),
    (AdaptiveConfig, WITH_PREFIX | {"measure": "iqr"}, r"measure='iqr' has no causal form"),
    (AdaptiveConfig, WITH_PREFIX | {"normalize": "feature"}, r"normalize='feature' compares clus"),
    (AdaptiveConfig, WITH_PREFIX | {"normalize": "global"}, r"use normalize='cluster'"),
    (AdaptiveConfig, WITH_PREFIX | {"statistics_of": "previous"}, r"use statistics_of='current'"),
    (
        AdaptiveConfig,
        {"statistics": "sequence", "statistics_of": "previous"},
        r"statistics='sequence' belongs to the reader's own positions; use statistics_of='current'",
    ),
    (
        AdaptiveConfig,
        {"eval_statistics": "prefix", "statistics_of": "previous"},
        r"statistics='prefix' belongs to the reader's own positions",
    ),
    (RandomConfig, {"std": -0.5}, r"std=-0.5; it must be 0 or more"),
    (RandomConfig, {"mix": 0}, r"mix=0; it must be at least 1"),
    (RandomConfig, {"base": HashConfig()}, r"base=HashConfig.* cannot be rescaled"),
    (SMoEConfig, {"gate": "some"}, r"gate='some' is unknown; choose one of auto, selected, all"),
    (SMoEConfig, {"init": "zeros"}, r"init='zeros' is unknown; choose one of uniform, orthogonal"),
    (SMoEConfig, {"noise": -1.0}, r"noise=-1.0; it must be 0 or more"),
    (SMoEConfig, {"balance_temperature": 0.0}, r"balance_temperature=0.0; it must be positive"),
    (SMoEConfig, {"bias_balancing": -0.1}, r"bias_balancing=-0.1; it must be 0 or more"),
    (CosineConfig, {"temperature": 0.0}, r"temperature=0.0; it must be positive"),
    (CosineConfig, {"proj_dim": 0}, r"proj_dim=0; it must be at least 1, or None for E / 2"),
    (CosineConfig, {"gate": "x"}, r"gate='x' is unknown"),
    (StableConfig, {"light_dim": 0}, r"light_dim=0; it must be at least 1"),
    (StableConfig, {"vocab_size": 0}, r"vocab_size=0; it must be at least 1"),
    (StableConfig, {"distill": -1.0}, r"distill=-1.0; it must be 0 or more"),
    (ThresholdConfig, {"threshold": 0.0}, r"threshold=0.0; .* needs one between 0 and 1"),
    (ThresholdConfig, {"threshold": 1.0}, r"threshold=1.0; .* needs one between 0 and 1"),
    (ThresholdConfig, {"surrogate": "relu"}, r"surrogate='relu' is unknown; .*sigmoid, straight"),
    (ThresholdConfig, {"temperature": 0.0}, r"temperature=0.0; it must be positive"),
    (ExpertChoiceConfig, {"capacity_factor": 0.0}, r"capacity_factor=0.0; it must be positive"),
    (SoftConfig, {"slots_per_expert": 0}, r"slots_per_expert=0; it must be at least 1"),
    (LossConfig, {"balance": -0.1}, r"balance=-0.1; it must be 0 or more"),
    (LossConfig, {"z": float("nan")}, r"z=nan; it must be 0 or more"),
]


@pytest.mark.parametrize(("config", "options", "message"), CONFIGS)
def test_a_config_that_cannot_work_is_refused(config, options, message):
    with pytest.raises(UserError, match=message) as caught:
        config(**options)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


SIZES = {"dim": 4, "num_experts": 3, "top_k": 2}
BUILDS = [
    (
        "hash",
        {"losses": LossConfig(importance_load=0.1)},
        r"needs a noisy top-k router, not .*hash",
    ),
    ("dense", {}, r"router='dense' is unknown; choose one of smoe, adaptive, cosine, stable"),
    ("smoe", {"top_k": 4}, r"top_k=4 exceeds num_experts=3; lower top_k"),
    ("adaptive", {"top_k": 4}, r"top_k=4 exceeds num_experts=3; lower top_k"),
    ("smoe", {"top_k": 0}, r"top_k=0; it must be at least 1"),
    ("smoe", {"num_experts": 0}, r"num_experts=0; it must be at least 1"),
    ("smoe", {"dim": 0}, r"dim=0; it must be at least 1"),
    ("stable", {}, r"vocab_size=None; .*StableConfig\(vocab_size=...\), or legacy=True"),
    (AdaptiveConfig(mix=4), {}, r"mix=4 exceeds num_experts=3; lower mix"),
    (RandomConfig(mix=4), {}, r"mix=4 exceeds num_experts=3; lower mix"),
    *(
        (
            router,
            {"losses": LossConfig(importance_load=0.1)},
            r"importance_load=0.1 needs a noisy top-k router, not router='\w+.*'; use balance",
        )
        for router in ("cosine", "threshold", "expert-choice", StableConfig(vocab_size=5))
    ),
    *(
        (
            router,
            {"losses": LossConfig(importance_load=0.1)},
            r"importance_load=0.1 .*set the router's noise above 0",
        )
        for router in ("smoe", "adaptive")
    ),
]


@pytest.mark.parametrize(("router", "options", "message"), BUILDS)
def test_a_router_that_cannot_be_built_is_refused(router, options, message):
    with pytest.raises(UserError, match=message):
        build_router(router, **(SIZES | options))


def route(router, x, *, state=None, **arguments):
    built = build_router(router, **SIZES)
    fitting = RoutingState.identity(num_tokens=6, num_clusters=3, dim=4, mix=built.mix)
    return built(x, fitting if state is None else state, **arguments)


X = torch.zeros(6, 4)
CALLS = [
    ("smoe", {"x": torch.zeros(6, 5)}, r"x has shape \(6, 5\); this layer takes \(tokens, 4\)"),
    ("smoe", {"x": torch.zeros(4)}, r"x has shape \(4,\); this layer takes"),
    ("smoe", {"x": torch.zeros(1, 1, 6, 4)}, r"x has shape \(1, 1, 6, 4\); this layer takes"),
    ("smoe", {"token_mask": torch.ones(5) > 0}, r"token_mask has shape \(5,\); .* needs \(6,\)"),
    ("smoe", {"token_mask": [True] * 6}, r"token_mask is a list; pass a bool tensor"),
    ("smoe", {"token_mask": torch.ones(6)}, r"token_mask has dtype torch.float32; pass a bool"),
    ("hash", {}, r"router='hash' routes by token id; pass token_ids with one id per token"),
    ("hash", {"token_ids": torch.zeros(5)}, r"pass token_ids with one id per token of x \(6,\)"),
    (StableConfig(vocab_size=5), {}, r"router='stable' routes by token id; pass token_ids"),
    (
        StableConfig(vocab_size=5),
        {"token_ids": torch.full((6,), 5)},
        r"token_ids holds id 5; ids must lie in \[0, 5\)",
    ),
    *(
        (
            router,
            {"state": RoutingState.identity(num_tokens=5, num_clusters=3, dim=4)},
            r"state.assignment has shape \(5, 1\); x has 6 tokens: pass the state of the same",
        )
        for router in ("adaptive", "random", AdaptiveConfig(statistics="prefix"))
    ),
    *(
        (
            router,
            {
                "state": RoutingState.identity(num_tokens=6, num_clusters=3, dim=4)._replace(
                    assignment=torch.zeros(6, 1)
                )
            },
            r"^state.assignment arrives in torch.float32; .*: pass it as torch.int64$",
        )
        for router in ("adaptive", "random", AdaptiveConfig(statistics="prefix"))
    ),
    (
        AdaptiveConfig(mix=2),
        {"state": RoutingState.identity(num_tokens=6, num_clusters=3, dim=4)},
        r"state.assignment has shape \(6, 1\); 6 tokens and mix=2 need \(6, 2\)",
    ),
    (
        "adaptive",
        {"state": RoutingState.identity(num_tokens=6, num_clusters=2, dim=4)},
        r"state.scale has 2 clusters; this router has 3: .* must agree on num_experts",
    ),
    (
        "adaptive",
        {"state": RoutingState.identity(num_tokens=6, num_clusters=3, dim=1)},
        r"state.scale has 1 features; the tokens have 4",
    ),
    (
        AdaptiveConfig(statistics="batch", statistics_of="current"),
        {
            "state": RoutingState.identity(num_tokens=6, num_clusters=3, dim=4)._replace(
                assignment=torch.full((6, 1), 3)
            )
        },
        r"assignment holds id 3; ids must lie in \[-1, 3\)",
    ),
]


@pytest.mark.parametrize(("router", "arguments", "message"), CALLS)
def test_tokens_that_do_not_fit_a_router_are_refused(router, arguments, message):
    with pytest.raises(UserError, match=message):
        route(router, **({"x": X} | arguments))


def test_a_router_without_decide_says_what_it_must_define():
    class Silent(Router):
        pass

    router = Silent(**SIZES)
    with pytest.raises(NotImplementedError, match="Silent must define decide"):
        router(X, RoutingState.identity(num_tokens=6, num_clusters=3, dim=4))
