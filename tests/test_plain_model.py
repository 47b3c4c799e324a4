"""The paper's model in plain PyTorch, as its specification: bitwise the library's loss on a CPU.

The functions below read a model's parameters and say, in some thirty lines, what its forward pass
is. The library must compute the same on its plain path and on its fast one.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

import acmoe
from acmoe.fast import restore
from acmoe.models.text.blocks import Attention, PostNormBlock
from acmoe.models.text.decoder import LanguageModel
from acmoe.ops.attention import window_attention
from acmoe.ops.cross_entropy.op import chunked_cross_entropy
from acmoe.ops.experts import ExpertWeights, expert_mlp
from acmoe.ops.sort import sort_rows
from acmoe.routing.statistics.cache import CarriedMoments
from slow_cases import mostly_slow


def moe(layer: acmoe.MoE, x: Tensor, state: acmoe.RoutingState, ids: Tensor, slot):
    scaled = layer.router.rescale(x, state, cache=slot)  # M_k* h (Eqn. 8)
    routing = layer.router.route(scaled, token_ids=ids)
    experts = layer.experts
    weights = ExpertWeights(experts.up, experts.down, experts.up_bias, experts.down_bias)
    rows = sort_rows(routing.expert_ids, layer.num_experts)
    dropout = experts.dropout if layer.training else 0.0
    y = expert_mlp(
        *(x.reshape(-1, layer.dim), weights, rows, routing.gate),
        activation="relu",
        dropout=dropout,
        complete=True,  # every row has an expert, which the kernel of the layer relies on
    )
    return y.view(x.shape), layer.next_state(x, routing, state)


def attention(a: Attention, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (a.heads, -1)).transpose(1, 2)

    q = heads(F.linear(x, a.query.weight))
    k, v = heads(F.linear(context, a.key.weight)), heads(F.linear(context, a.value.weight))
    dropout = a.dropout if a.training else 0.0
    out = window_attention(q, k, v, span=a.span, positions=positions, dropout=dropout)
    return F.linear(out.transpose(1, 2).flatten(2), a.output.weight)


def block(b: PostNormBlock, x, state, context, positions, ids, slot):
    h = b.norm_attention(x + attention(b.attention, x, context, positions))
    y, state = moe(b.layer, h, state, ids, slot)
    return b.norm_layer(h + b.norm_inner(h + b.dropout(y))), state


def loss_of(m: LanguageModel, tokens: Tensor, targets: Tensor, memory):
    x, after = m.embed(tokens), []
    state = acmoe.RoutingState.identity(
        num_tokens=tokens.numel(), num_clusters=m.config.num_experts, dim=m.config.dim
    )
    for depth, one in enumerate(m.blocks):
        hidden, slot = memory[depth] if memory else (x.detach()[:, :0], None)
        # Prefix statistics continue after the tokens of earlier segments.
        slot = CarriedMoments(slot and slot.after) if one.layer.router.carries_moments else None
        context = torch.cat([hidden, x], 1)
        after.append((context.detach()[:, -m.config.span :], slot))
        x, state = block(one, x, state, context, m.positions, tokens, slot)
    x = m.norm(x).flatten(0, 1)
    loss = chunked_cross_entropy(x, m.unembed.weight, m.unembed.bias, targets.flatten())
    return loss + state.aux_loss, after


ROUTERS = [
    "smoe",
    acmoe.AdaptiveConfig(statistics="batch"),
    acmoe.AdaptiveConfig(statistics="running"),
    acmoe.AdaptiveConfig(statistics="prefix"),
    acmoe.AdaptiveConfig.preset("reference-lm"),
]
NAMES = ["smoe", "batch", "running", "prefix", "published"]


@mostly_slow(
    ("router", "fast"),
    [(router, fast) for fast in (False, True) for router in ROUTERS],
    ids=[f"{name}-{fast}" for fast in (False, True) for name in NAMES],
    keep={*range(len(NAMES)), 2 * len(NAMES) - 1},  # the fast path once
)
def test_the_library_computes_what_thirty_lines_say(router, fast: bool) -> None:
    torch.manual_seed(0)
    model = acmoe.create_model("switch-nano", router=router).train()
    if not fast:
        restore(model)
    tokens, targets = torch.randint(0, 256, (2, 3, 64)), torch.randint(0, 256, (2, 3, 64))
    losses, gradients = [], []
    for plain in (True, False):
        torch.manual_seed(1)  # dropout
        model.zero_grad()
        memory, total = None, torch.zeros(())
        for segment, target in zip(tokens, targets, strict=True):  # two segments with memory
            if plain:
                loss, memory = loss_of(model, segment, target, memory)
            else:
                out = model(segment, target, memory=memory)
                loss, memory = out.loss + out.aux_loss, out.memory
            total = total + loss
        total.backward()
        losses.append(total.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert torch.equal(*losses)
    assert len(gradients[0]) == len(gradients[1]) > 50
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
