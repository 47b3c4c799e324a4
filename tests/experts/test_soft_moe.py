"""SoftMoE, plain and adaptive, against a loop over sequences, slots and experts.

B sequences of L tokens, D features, E experts, P slots per expert.
"""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_loops import expert
from safetensors.torch import load_file, save_file

from acmoe import AdaptiveConfig, RandomConfig, RoutingState, SoftConfig, SoftMoE, UserError

SOFT_AC = AdaptiveConfig(base=SoftConfig(), statistics="batch", mix=8)


def build(router="soft", *, num_experts=3, seed=0, **options):
    torch.manual_seed(seed)
    return SoftMoE(dim=4, hidden=5, num_experts=num_experts, router=router, **options).double()


def begin(moe, num_tokens):
    return RoutingState.identity(
        num_tokens=num_tokens,
        num_clusters=moe.num_experts,
        dim=4,
        mix=moe.router.mix,
        dtype=torch.float64,
    )


def loop(x, scaled, slots, logit_scale, weights, per_expert, activation="gelu"):
    """One sequence: logits of rescaled tokens, slots of the tokens themselves."""
    unit = torch.stack([row / row.norm() for row in scaled])
    logits = logit_scale * unit @ torch.stack([slot / slot.norm() for slot in slots]).T
    outputs = []
    for s in range(len(slots)):
        share = torch.exp(logits[:, s]) / torch.exp(logits[:, s]).sum()
        filled = sum(share[t] * x[t] for t in range(len(x)))
        outputs.append(expert(filled, weights, s // per_expert, activation))
    result = []
    for t in range(len(x)):
        share = torch.exp(logits[t]) / torch.exp(logits[t]).sum()
        result.append(sum(share[s] * outputs[s] for s in range(len(slots))))
    share = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    return torch.stack(result), share.view(len(x), -1, per_expert).sum(-1)


def test_the_experts_are_called_as_a_module():
    # An offloading hook puts the weights in place for the call, an observing one sees the slots.
    moe, x = build(), torch.randn(2, 4, 4, dtype=torch.float64)
    wanted, _ = moe(x)
    stored, seen = moe.experts.up, []
    moe.experts.up = torch.nn.Parameter(stored.to("meta"))

    def load(module, arguments):
        seen.append(tuple(arguments[0].shape))
        module.up = stored

    moe.experts.register_forward_pre_hook(load)
    assert torch.equal(moe(x)[0], wanted)
    assert seen == [(3, 2, 4)]  # three experts, a slot of each for two sequences, four features


@given(
    sequences=st.integers(1, 2),
    length=st.integers(1, 4),
    num_experts=st.integers(1, 3),
    per_expert=st.integers(1, 2),
    activation=st.sampled_from(["relu", "gelu", "swiglu"]),
    seed=st.integers(0, 99),
)
def test_the_layer_equals_a_loop_with_every_gradient(
    sequences, length, num_experts, per_expert, activation, seed
):
    config = SoftConfig(slots_per_expert=per_expert)
    moe = build(config, num_experts=num_experts, seed=seed, activation=activation)
    x = torch.randn(sequences, length, 4, dtype=torch.float64, requires_grad=True)
    y, _ = moe(x, begin(moe, sequences * length))

    leaves = {key: p.detach().clone().requires_grad_() for key, p in moe.named_parameters()}
    weights = {key.removeprefix("experts."): p for key, p in leaves.items() if "experts." in key}
    source = x.detach().clone().requires_grad_()
    slots, scale = leaves["router.slots"], leaves["router.logit_scale"]
    wanted = torch.stack(
        [loop(row, row, slots, scale, weights, per_expert, activation)[0] for row in source]
    )
    torch.testing.assert_close(y, wanted, rtol=1e-9, atol=1e-11)
    weight = torch.randn_like(y)
    got = torch.autograd.grad((y * weight).sum(), [x, *moe.parameters()])
    expected = torch.autograd.grad((wanted * weight).sum(), [source, *leaves.values()])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_soft_ac_mixes_the_scales_of_eight_clusters():
    # Ten experts: the eight best clusters count, by their renormalised share in the token.
    first, second = (build(SOFT_AC, num_experts=10, seed=seed) for seed in (0, 1))
    x = torch.randn(2, 15, 4, dtype=torch.float64)
    y, state = first(x, begin(first, 30))
    z, _ = second(y, state)

    weights = [dict(moe.experts.named_parameters()) for moe in (first, second)]
    found = [loop(row, row, first.base.slots, 1.0, weights[0], 1) for row in x]
    share = torch.cat([part for _, part in found])
    chosen = share.argmax(1)
    tokens = x.flatten(0, 1)
    scale = torch.ones(10, 4, dtype=torch.float64)
    for c in range(10):
        members = tokens[chosen == c]
        if len(members) >= 2:
            s = (members - members.mean(0)).abs().mean(0)
            scale[c] = 1 / s / (1 / s).mean()
    factor = torch.zeros(30, 4, dtype=torch.float64)
    for t in range(30):
        best = sorted(range(10), key=lambda e: -share[t, e].item())[:8]
        total = sum(share[t, e] for e in best)
        factor[t] = sum(share[t, e] / total * scale[e] for e in best)
    assert state.assignment.shape == (30, 8)
    torch.testing.assert_close(state.scale, scale)
    scaled = y * factor.view(2, 15, 4)
    wanted = [
        loop(a, b, second.base.slots, 1.0, weights[1], 1)[0] for a, b in zip(y, scaled, strict=True)
    ]
    torch.testing.assert_close(z, torch.stack(wanted))


def test_adaptive_soft_with_the_identity_is_bitwise_the_plain_layer():
    adaptive = build(dataclasses.replace(SOFT_AC, mix=2))
    plain = build("soft")
    plain.router.load_state_dict(adaptive.base.state_dict())
    plain.experts.load_state_dict(adaptive.experts.state_dict())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    assert torch.equal(adaptive(x, begin(adaptive, 10))[0], plain(x, begin(plain, 10))[0])


def test_padding_changes_nothing_whatever_it_holds():
    moe = build(dataclasses.replace(SOFT_AC, mix=2, detach=False))
    mask = torch.tensor([[True, True, True, False], [False] * 4, [True, False, True, True]])
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    results = []
    for garbage in (0.0, 1e300, float("inf"), float("nan")):
        tokens = x.masked_fill(~mask[..., None], garbage).requires_grad_()
        y, state = moe(tokens, begin(moe, 12), token_mask=mask)
        z, state = moe(y + tokens, state, token_mask=mask)
        assert (z[~mask] == 0).all()
        grads = torch.autograd.grad(z.square().sum(), [tokens, *moe.parameters()])
        results.append([z, state.scale, state.assignment[mask.flatten()], *grads])
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)
    y, _ = moe(x[2:, [0, 2, 3]], begin(moe, 3))
    alone, _ = moe(x, begin(moe, 12), token_mask=mask)
    torch.testing.assert_close(alone[2, mask[2]], y[0])


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (2, 0, 4), (0, 3, 4)])
def test_no_token_and_one_token_pass_forwards_and_backwards(shape):
    moe = build(dataclasses.replace(SOFT_AC, mix=2))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, state = moe(x, begin(moe, x[..., 0].numel()))
    y, state = moe(y, state)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


def test_a_saved_layer_holds_every_tensor_once(tmp_path):
    for router in ("soft", dataclasses.replace(SOFT_AC, mix=2)):
        moe = build(router)
        save_file(moe.state_dict(), tmp_path / "soft.safetensors")
        other = build(router, seed=1)
        other.load_state_dict(load_file(tmp_path / "soft.safetensors"))
        x = torch.randn(1, 5, 4, dtype=torch.float64)
        assert torch.equal(moe(x, begin(moe, 5))[0], other(x, begin(other, 5))[0])


def test_a_layer_emits_for_the_reader_it_is_given():
    config = dataclasses.replace(SOFT_AC, mix=2)
    assert build(config).next_state.next_router is config
    assert build(config, next_router=None).next_state.statistics is None
    assert build("soft", next_router=config).next_state.statistics is not None
    assert build("soft").next_state.next_router is None
    assert build(RandomConfig(base=SoftConfig())).next_state.next_router.name == "random"


@pytest.mark.parametrize("router", ["smoe", "adaptive", AdaptiveConfig()])
def test_a_router_that_chooses_experts_is_refused(router):
    with pytest.raises(UserError, match=r"chooses experts; SoftMoE takes 'soft', SoftConfig"):
        build(router)


def test_the_output_of_sequences_is_no_view():
    y, _ = SoftMoE(dim=4, hidden=6, num_experts=3)(torch.randn(2, 5, 4))
    assert y.shape == (2, 5, 4)
    assert y._base is None
