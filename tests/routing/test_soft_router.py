"""Soft slots: their mixtures against a loop over scalars.

B sequences of L tokens, D features, E experts, P slots per expert, S = E * P slots.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from router_loops import dot, rows, softmax

from acmoe import RoutingState, SoftConfig, build_router


def build(*, dim=4, num_experts=3, slots=1, seed=0):
    torch.manual_seed(seed)
    config = SoftConfig(slots_per_expert=slots)
    return build_router(config, dim=dim, num_experts=num_experts, top_k=1).double()


@given(
    sequences=st.integers(1, 2),
    length=st.integers(1, 4),
    dim=st.integers(1, 4),
    num_experts=st.integers(1, 3),
    slots=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_dispatch_and_combine_equal_a_loop_over_scalars(
    sequences, length, dim, num_experts, slots, seed
):
    router = build(dim=dim, num_experts=num_experts, slots=slots, seed=seed)
    with torch.no_grad():
        router.logit_scale.fill_(2.5)
    x = torch.randn(sequences, length, dim, dtype=torch.float64)
    found = router.mixtures(x, None)
    for b in range(sequences):
        logits = []
        for token in rows(x[b]):
            unit = [value / dot(token, token).sqrt() for value in token]
            logits.append(
                [2.5 * dot(unit, slot) / dot(slot, slot).sqrt() for slot in rows(router.slots)]
            )
        for s in range(num_experts * slots):
            column = torch.stack(softmax([row[s] for row in logits]))
            torch.testing.assert_close(found.dispatch[b, :, s], column, rtol=1e-10, atol=1e-12)
        for t in range(length):
            share = softmax(logits[t])
            wanted = torch.stack(share)
            torch.testing.assert_close(found.combine[b, t], wanted, rtol=1e-10, atol=1e-12)
            by_expert = [sum(share[e * slots : (e + 1) * slots]) for e in range(num_experts)]
            routing, place = found.routing, b * length + t
            torch.testing.assert_close(routing.affinity[place].exp(), torch.stack(by_expert))
            best = max(range(num_experts), key=lambda e: by_expert[e].item())
            assert routing.expert_ids[place].item() == best
            torch.testing.assert_close(routing.gate[place, 0], by_expert[best])


def test_logits_are_bounded_by_the_learned_scale_whatever_the_tokens():
    router = build()
    x = 1e4 * torch.randn(1, 5, 4, dtype=torch.float64)
    combine = router.mixtures(x, None).combine
    # A softmax of three numbers in [-1, 1] lies within e^2 of uniform.
    assert combine.min() > 1 / (1 + 2 * torch.e**2) - 1e-9


def test_sequences_do_not_see_each_other_and_padding_fills_no_slot():
    router = build(slots=2)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    masked, alone = router.mixtures(x, mask), router.mixtures(x[:1, :3], None)
    assert (masked.dispatch[0, 3:] == 0).all()
    torch.testing.assert_close(masked.dispatch[0, :3], alone.dispatch[0])
    torch.testing.assert_close(masked.dispatch[1], router.mixtures(x[1:], None).dispatch[0])


def test_a_sequence_of_padding_alone_gives_no_nan():
    router = build()
    x = torch.zeros(1, 3, 4, dtype=torch.float64)
    found = router.mixtures(x, torch.zeros(1, 3, dtype=torch.bool))
    assert (found.dispatch == 0).all()
    assert found.combine.isfinite().all()


def test_flat_tokens_are_one_sequence():
    router = build()
    x = torch.randn(5, 4, dtype=torch.float64)
    state = RoutingState.identity(num_tokens=5, num_clusters=3, dim=4)
    for a, b in zip(router(x, state)[:4], router(x[None], state)[:4], strict=True):
        torch.testing.assert_close(a, b)
    assert router.causal is False
