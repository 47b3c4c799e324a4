"""Statistics before a norm's gain, and of the residual stream.

T tokens, D features, C clusters.
"""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import acmoe
from acmoe import AdaptiveConfig, MoE, RoutingState, UserError, override_statistics
from acmoe.config.text.language import LanguageConfig
from acmoe.fast import accelerate, explain
from acmoe.lab.variants import VariantConfig, hand_over_tokens
from acmoe.models.registry import build_model
from acmoe.models.text.decoder import LanguageModel
from acmoe.ops.statistics.scale import cluster_scale

MODEL = LanguageConfig(
    vocab_size=64, dim=16, heads=2, hidden=8, repeats=2, span=8, block=8, dropout=0.0, num_experts=3
)
OPTIONS = [{"gain": False}, {"read": "residual"}]


def model_of(norm, **options):
    """Two blocks whose norms have gains and biases, as after training."""
    torch.manual_seed(0)
    router = VariantConfig(statistics="batch", **options)
    model = build_model(replace(MODEL, norm=norm, router=router)).double().eval()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.2, 2.0, generator=generator)
            nn.init.uniform_(module.bias, -1.0, 1.0, generator=generator)
    return model


def norm_before(block, norm):
    return block.norm_layer if norm == "pre" else block.norm_attention


def tokens_of(seed=2):
    return torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(seed))


def first_state(model, norm):
    """Inputs of the norm before the first MoE layer, of that layer, and the state it hands on."""
    block = model.blocks[0]
    layer_norm = norm_before(block, norm)
    seen = {}
    handles = [
        layer_norm.register_forward_hook(lambda m, given, out: seen.update(residual=given[0])),
        block.layer.register_forward_hook(lambda m, given, out: seen.update(h=given[0], to=out[1])),
    ]
    model(tokens_of())
    for handle in handles:
        handle.remove()
    return seen["residual"], seen["h"], seen["to"], layer_norm


def scale_over(tokens, state):
    return cluster_scale(tokens.flatten(0, 1), state.assignment[:, 0], 3)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_gain_the_statistics_are_those_of_the_token_divided_back(norm):
    _, h, state, layer_norm = first_state(model_of(norm, gain=False), norm)
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
    residual, h, state, _ = first_state(model_of(norm, read="residual"), norm)
    torch.testing.assert_close(state.scale, scale_over(residual, state))
    assert not torch.allclose(state.scale, scale_over(h, state))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_by_default_they_are_the_routers_input(norm):
    _, h, state, _ = first_state(model_of(norm), norm)
    torch.testing.assert_close(state.scale, scale_over(h, state))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_default_hands_no_other_tokens_on(norm):
    model = model_of(norm, power=0.5)
    assert not any(norm_before(block, norm)._forward_pre_hooks for block in model.blocks)
    plain = build_model(replace(MODEL, norm=norm, router=AdaptiveConfig()))
    hand_over_tokens(plain)
    assert not any(norm_before(block, norm)._forward_pre_hooks for block in plain.blocks)


def test_padding_changes_nothing_about_the_residuals_statistics():
    model = model_of("pre", read="residual")
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    logits = []
    for filler in (0, 7):
        padded = tokens_of().masked_fill(~mask, filler)
        logits.append(model(padded, token_mask=mask).logits[mask])
    assert torch.equal(*logits)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_layer_that_is_not_given_the_tokens_says_what_to_call(options):
    config = VariantConfig(statistics="batch", **options)
    moe = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=config)
    state = RoutingState.identity(num_tokens=5, num_clusters=3, dim=4)
    wanted = r"which nothing has handed over; .*acmoe.lab.variants.hand_over_tokens\(model\)"
    with pytest.raises(UserError, match=wanted):
        moe(torch.randn(5, 4), state)
    moe.next_state.statistics.handed_over = torch.randn(4, 4)  # of another call
    with pytest.raises(UserError, match=wanted):
        moe(torch.randn(5, 4), state)


def test_a_model_made_by_its_class_works_once_the_hooks_are_there():
    built = model_of("post", read="residual")
    model = LanguageModel(built.config).double().eval()
    model.load_state_dict(built.state_dict())
    with pytest.raises(UserError, match="hand_over_tokens"):
        model(tokens_of())
    for _ in range(2):  # a second call installs no second hook
        hand_over_tokens(model)
    assert all(len(block.norm_attention._forward_pre_hooks) <= 1 for block in model.blocks)
    assert torch.equal(model(tokens_of()).logits, built(tokens_of()).logits)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_recomputed_blocks_give_the_same_gradients(norm, options):
    gradients = []
    for checkpointed in (False, True):
        model = model_of(norm, detach=False, **options).train()
        model.checkpoint_blocks = checkpointed
        out = model(tokens_of(), tokens_of(3))
        (out.loss + out.aux_loss).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, recomputed = gradients
    trained = {name: grad for name, grad in plain.items() if grad is not None}
    assert any("router" in name for name in trained)
    for name, grad in trained.items():
        torch.testing.assert_close(recomputed[name], grad, rtol=1e-12, atol=1e-14)


def test_a_copy_hands_the_tokens_to_its_own_statistics():
    model = model_of("post", read="residual")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        wanted = model(tokens_of()).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(tokens_of()).logits, wanted)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loaded_model_has_the_hooks(tmp_path, options):
    model = model_of("post", **options)
    acmoe.save(model, tmp_path)
    assert torch.equal(acmoe.load(tmp_path)(tokens_of()).logits, model(tokens_of()).logits)


def test_the_tokens_can_be_changed_for_an_evaluation():
    model, plain = model_of("pre", read="residual"), model_of("pre")
    with override_statistics(model, read="normed"):
        assert torch.equal(model(tokens_of()).logits, plain(tokens_of()).logits)
    assert not torch.equal(model(tokens_of()).logits, plain(tokens_of()).logits)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_fast_runner_computes_the_same(norm):
    model = model_of(norm, read="residual")
    wanted = model(tokens_of()).logits
    accelerate(model)
    torch.testing.assert_close(model(tokens_of()).logits, wanted)
    if norm == "post":
        assert "blocks.0.norm_attention has hooks" in explain(model)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_block_with_the_hook_compiles(options):
    model = model_of("post", **options)
    with torch.no_grad():
        wanted = model(tokens_of()).logits
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager", dynamic=False, fullgraph=True)
        with warnings.catch_warnings():  # of what dynamo itself does while it traces
            warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
            found = model(tokens_of()).logits
        torch.testing.assert_close(found, wanted)
