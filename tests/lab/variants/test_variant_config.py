"""Variants of the adaptive router that cannot work are refused in one line."""

from typing import Any

import pytest

from acmoe import AdaptiveConfig, CosineConfig, UserError
from acmoe.config.serialize import decode, encode
from acmoe.lab.variants import VariantConfig, variant_of
from acmoe.lab.variants.config import as_in_0_1

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"power": 0.0}, r"power=0.0; it must lie in \(0, 1\], and 0 would be router='smoe'"),
    ({"power": 1.5}, r"power=1.5; it must lie in"),
    ({"power": float("nan")}, r"power=nan; it must lie in"),
    ({"part": "mine"}, r"part='mine' is unknown; choose one of both, common, own"),
    ({"part": "own", "statistics": "prefix"}, r"part='own' .*statistics='prefix' .*'running'"),
    ({"part": "common", "statistics": "sequence"}, r"part='common' compares clusters"),
    ({"part": "own", "eval_statistics": "prefix"}, r"part='own' compares clusters"),
    ({"part": "common", "normalize": "feature"}, r"the plain router; use normalize='cluster'"),
    ({"fade_steps": 0}, r"fade_steps=0; it must be at least 1, or None for an M that stays"),
    ({"fade_steps": 5, "mean_over": "chosen"}, r"fade_steps=5 compare all: use mean_over='all'"),
    ({"center": True}, r"center=True needs means of the very tokens .*statistics_of='current'"),
    ({"center": True, "statistics": "prefix"}, r"center=True needs means"),
    ({"match": True, "base": CosineConfig()}, r"match=True .* base='cosine' .*use SMoEConfig"),
    ({"match": True, "mix": 2}, r"match=True gives each cluster one temperature.* mix=2"),
    ({"match": True, "scale_experts": True}, r"scale_experts=True it cannot"),
    ({"strength": 1.0, "strength_end": 0.1}, r"strength_steps=None make one schedule; give both"),
    ({"strength": 1.0, "strength_steps": 5}, r"strength_end=None and strength_steps=5 make one"),
    ({"strength_end": 0.1, "strength_steps": 5}, r"strength=None is the paper's 1/s"),
    ({"learn_strength": True}, r"strength=None is the paper's 1/s, .*give strength a first value"),
    ({"strength": 1.0, "strength_end": 0.0, "strength_steps": 5}, r"strength_end=0.0; it must be"),
    ({"strength": 1.0, "strength_end": 0.1, "strength_steps": 0}, r"strength_steps=0; it must be"),
    (
        {"strength": 1.0, "strength_end": 0.1, "strength_steps": 5, "learn_strength": True},
        r"learn_strength and strength_end both move lambda; use one",
    ),
    ({"read": "output"}, r"read='output' is unknown; choose one of normed, residual"),
    ({"gain": False, "read": "residual"}, r"the residual stream has no gain to leave out"),
    ({"gain": False, "statistics_of": "current"}, r"gain=False and .*: use 'previous'"),
    ({"read": "residual", "statistics": "prefix"}, r"read='residual' are about what a layer"),
    ({"distance": True, "base": CosineConfig()}, r"distance=True .* base='cosine' .*SMoEConfig"),
    ({"distance": True, "mix": 2}, r"one M for each cluster; with mix=2 .*use mix=1"),
    ({"distance": True, "statistics": "prefix"}, r"mix=1 and statistics prefix a token has its"),
    ({"distance": True, "eval_statistics": "sequence"}, r"statistics running, sequence a token"),
    ({"distance": True, "match": True}, r"center=False and match=True correct; use one"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_variant_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        VariantConfig(**options)
    assert "\n" not in str(caught.value)


def test_a_config_with_variants_comes_back_from_json() -> None:
    config = VariantConfig(power=0.5, part="own", match=True, strength=2.0, learn_strength=True)
    assert encode(config)["name"] == "adaptive-variant"
    for kind in (AdaptiveConfig, VariantConfig):
        assert decode(encode(config), kind, "a test") == config


def test_a_distance_is_stored_as_a_variant_and_left_out_of_the_digest_where_it_is_off() -> None:
    near = VariantConfig(distance=True)
    stored = as_in_0_1(encode(near))
    assert stored["name"] == "adaptive-variant" and stored["distance"] is True
    assert decode(stored, AdaptiveConfig, "a test") == near
    assert "distance" not in as_in_0_1(encode(VariantConfig(power=0.5)))


def test_an_m_that_fades_is_stored_as_a_variant_too() -> None:
    fading = VariantConfig(fade_steps=5)
    assert decode(as_in_0_1(encode(fading)), AdaptiveConfig, "a test") == fading
    assert "fade_steps" not in as_in_0_1(encode(VariantConfig(power=0.5)))


def test_a_config_stored_before_there_were_variants_is_read_as_without_them() -> None:
    stored = encode(AdaptiveConfig())
    assert "power" not in stored
    assert decode(stored, AdaptiveConfig, "a test") == AdaptiveConfig()


def test_a_change_of_an_adaptive_config_is_a_variant_only_where_it_must_be() -> None:
    paper = AdaptiveConfig.preset("paper")
    assert variant_of(paper, mix=2) == AdaptiveConfig(
        statistics="batch", statistics_of="previous", mix=2
    )
    near = variant_of(paper, distance=True)
    assert near == VariantConfig(statistics="batch", statistics_of="previous", distance=True)
    found = variant_of(paper, power=0.5, mix=2)
    assert found == VariantConfig(statistics="batch", statistics_of="previous", mix=2, power=0.5)
    assert variant_of(found, mix=1) == VariantConfig(
        statistics="batch", statistics_of="previous", power=0.5
    )
