"""Statistics before a norm's gain, and of the residual stream.

T tokens, D features, C clusters.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from acmoe import AdaptiveConfig, MoE, RoutingState, UserError
from acmoe.config.text.language import LanguageConfig
from acmoe.models.text.blocks import statistics_source
from acmoe.models.text.decoder import LanguageModel
from acmoe.ops.statistics.scale import cluster_scale

MODEL = LanguageConfig(
    vocab_size=64, dim=16, heads=2, hidden=8, repeats=2, span=8, block=8, dropout=0.0, num_experts=3
)


def model_of(norm, **options):
    """Two blocks whose norms have gains and biases, as after training."""
    torch.manual_seed(0)
    router = AdaptiveConfig(statistics="batch", **options)
    model = LanguageModel(replace(MODEL, norm=norm, router=router)).double().eval()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.2, 2.0, generator=generator)
            nn.init.uniform_(module.bias, -1.0, 1.0, generator=generator)
    return model


def first_emission(model):
    """Inputs of the norm before the first MoE layer, of that layer, and the state it emits."""
    block = model.blocks[0]
    norm = block.norm_layer if block.pre else block.norm_attention
    seen = {}
    handles = [
        norm.register_forward_hook(lambda m, given, out: seen.update(residual=given[0])),
        block.layer.register_forward_hook(lambda m, given, out: seen.update(h=given[0], to=out[1])),
    ]
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(2))
    model(tokens)
    for handle in handles:
        handle.remove()
    return seen["residual"], seen["h"], seen["to"], norm


def scale_over(tokens, state):
    return cluster_scale(tokens.flatten(0, 1), state.assignment[:, 0], 3)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_gain_the_statistics_are_those_of_the_token_divided_back(norm):
    _, h, state, layer_norm = first_emission(model_of(norm, gain=False))
    # h = g z + b, so z = (h - b) / g.
    z = (h - layer_norm.bias) / layer_norm.weight
    torch.testing.assert_close(state.scale, scale_over(z, state), rtol=1e-8, atol=1e-10)
    # The dispersion of h is |g| times that of z: M of h is M of z over |g|, mean one again.
    informs_C = state.assignment[:, 0].bincount(minlength=3) >= 2
    divided = scale_over(z, state)[informs_C] / layer_norm.weight.abs()
    wanted = divided / divided.mean(1, keepdim=True)
    torch.testing.assert_close(scale_over(h, state)[informs_C], wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_of_the_residual_stream_the_statistics_are_those_the_norm_reads(norm):
    residual, h, state, _ = first_emission(model_of(norm, read="residual"))
    torch.testing.assert_close(state.scale, scale_over(residual, state))
    assert not torch.allclose(state.scale, scale_over(h, state))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_by_default_they_are_the_routers_input(norm):
    _, h, state, _ = first_emission(model_of(norm))
    torch.testing.assert_close(state.scale, scale_over(h, state))


def test_the_default_hands_no_other_tokens_on():
    x, seen, norm = torch.randn(2, 3, 4), torch.randn(2, 3, 4), nn.LayerNorm(4)
    assert statistics_source(AdaptiveConfig(), (x, seen), norm) is None
    assert statistics_source(None, (x, seen), norm) is None
    found = statistics_source(AdaptiveConfig(read="residual"), (x, seen), norm)
    torch.testing.assert_close(found, x + seen)


def test_padding_changes_nothing_about_the_residuals_statistics():
    model = model_of("pre", read="residual")
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    logits = []
    for filler in (0, 7):
        padded = tokens.masked_fill(~mask, filler)
        logits.append(model(padded, token_mask=mask).logits[mask])
    assert torch.equal(*logits)


def test_a_layer_that_is_not_given_the_tokens_says_what_to_pass():
    config = AdaptiveConfig(statistics="batch", read="residual")
    moe = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=config)
    state = RoutingState.identity(num_tokens=5, num_clusters=3, dim=4)
    with pytest.raises(UserError, match=r"read='residual' .* pass source= of shape \(5, 4\)"):
        moe(torch.randn(5, 4), state)
    with pytest.raises(UserError, match=r"pass source= of shape \(5, 4\)"):
        moe(torch.randn(5, 4), state, source=torch.randn(4, 4))
    y, _ = moe(torch.randn(5, 4), state, source=torch.randn(5, 4))
    assert y.shape == (5, 4)
