"""Presets are the published settings; radii may be fractions; nonsense is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acmoe.config.images.attack import (
    AttackConfig,
    AutoAttackConfig,
    FGSMConfig,
    PGDConfig,
    SPSAConfig,
    attack_config,
    eps_text,
    parse_eps,
)
from acmoe.config.overrides import override
from acmoe.config.serialize import decode, encode
from acmoe.errors import UserError


def test_the_default_attacks_pixels_within_their_range_away_from_the_truth() -> None:
    for name in ("fgsm", "pgd", "spsa", "autoattack"):
        config = attack_config(name)
        assert config.attack.name == name
        assert (config.space, config.clamp, config.labels) == ("pixel", True, "true")
    assert attack_config("pgd").attack == PGDConfig(steps=20, step_size=0.15, random_start=True)
    assert attack_config("spsa").eps == (1 / 255, 8 / 255)
    assert attack_config("pgd", eps=(0.1, 0.2)).eps == (0.1, 0.2)


def test_the_papers_preset_is_unbounded_normalised_and_self_labelled() -> None:
    for name, eps in (("fgsm", 1 / 255), ("pgd", 1 / 255), ("spsa", 1.0)):
        config = attack_config(name, preset="paper")
        assert (config.space, config.clamp, config.labels) == ("normalized", False, "predicted")
        assert config.eps == (eps,)
    spsa = attack_config("spsa", preset="paper").attack
    assert spsa == SPSAConfig(steps=20, directions=128, delta=0.01, lr=0.01)
    with pytest.raises(UserError, match="the paper does not use autoattack"):
        attack_config("autoattack", preset="paper")


def test_a_sweep_is_stored_and_overridden_as_any_config() -> None:
    config = attack_config("pgd", eps=(1 / 255, 2 / 255))
    assert decode(encode(config), AttackConfig, "x") == config
    changed = override(config, ["attack=spsa", "attack.steps=3", "batch=7", "eps=0.1,0.2"])
    assert changed.attack == SPSAConfig(steps=3) and changed.batch == 7
    assert changed.eps == (0.1, 0.2)


@pytest.mark.parametrize(
    ("text", "value"), [("1/255", 1 / 255), (" 8/255 ", 8 / 255), ("0.03", 0.03), ("1e-3", 1e-3)]
)
def test_radii_are_numbers_or_fractions(text: str, value: float) -> None:
    assert math.isclose(parse_eps(text), value)


@pytest.mark.parametrize("text", ["", "one", "1/0", "0", "-1/255", "nan", "1/2/3"])
def test_other_radii_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="eps="):
        parse_eps(text)


@given(st.integers(1, 254))
def test_radii_are_shown_as_they_were_given(levels: int) -> None:
    assert eps_text(parse_eps(f"{levels}/255")) == f"{levels}/255"
    assert parse_eps(eps_text(levels / 255)) == levels / 255


def test_other_radii_are_shown_as_numbers() -> None:
    assert [eps_text(eps) for eps in (1.0, 0.1, 0.001)] == ["1", "0.1", "0.001"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"eps": ()}, "eps is empty"),
        ({"eps": (8.0,)}, "eps=8; it must be above 0 and at most 1, the range of pixels; did you"),
        ({"eps": (0.0,)}, "eps=0.0; it must be positive"),
        ({"eps": (0.1, 0.1)}, "eps=0.1, 0.1 names a radius twice"),
        ({"attack": "pgd"}, "attack='pgd' is no attack; choose one of fgsm, pgd"),
        ({"space": "latent"}, "space='latent' is unknown"),
        ({"labels": "other"}, "labels='other' is unknown"),
        ({"split": "train"}, "split='train' is unknown"),
        ({"statistics": "none"}, "statistics='none' is unknown"),
        ({"batch": 0}, "batch=0"),
        ({"order": "random"}, "order='random' is unknown"),
        ({"limit": 0}, "limit=0"),
        ({"seed": -1}, "seed=-1"),
        ({"attack": AutoAttackConfig(), "clamp": False}, "autoattack knows only space=pixel"),
    ],
)
def test_sweeps_that_make_no_sense_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        AttackConfig(**{"attack": FGSMConfig(), "eps": (0.1,), **settings})


@pytest.mark.parametrize(
    ("make", "settings", "complaint"),
    [
        (PGDConfig, {"steps": 0}, "steps=0"),
        (PGDConfig, {"step_size": 0.0}, "step_size=0.0"),
        (SPSAConfig, {"directions": 0}, "directions=0"),
        (SPSAConfig, {"copies": 0}, "copies=0"),
        (SPSAConfig, {"delta": -1.0}, "delta=-1.0"),
        (SPSAConfig, {"lr": 0.0}, "lr=0.0"),
        (SPSAConfig, {"estimate_at": "half"}, "estimate_at='half' is unknown"),
        (AutoAttackConfig, {"version": "v2"}, "version='v2' is unknown"),
    ],
)
def test_attacks_that_make_no_sense_are_refused(
    make: type, settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        make(**settings)


def test_unknown_attacks_and_presets_are_named() -> None:
    with pytest.raises(UserError, match="attack='cw' is unknown; choose one of fgsm, pgd, spsa"):
        attack_config("cw")
    with pytest.raises(UserError, match="preset='strong' is unknown"):
        attack_config("pgd", preset="strong")
