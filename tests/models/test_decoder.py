"""The whole decoder: causal, pure, the same in segments, in pieces and under padding.

Shapes: B batch, L length, V words.
"""

import copy
from threading import Thread
from typing import Any

import pytest
import torch
from tiny_decoder import CAUSAL, VOCAB, config, draw, trained
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from acmoe.config.routing import RouterConfig
from acmoe.errors import UserError
from acmoe.models.text.decoder import LanguageModel
from largest_tensor import LargestTensor
from slow_cases import mostly_slow


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, tokens, targets = trained(), draw(0, 3, 7), draw(1, 3, 7)
    scored = model(tokens, targets)
    logits = model(tokens).logits
    assert scored.logits is None
    assert logits.shape == (3, 7, VOCAB)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(scored.loss, expected, rtol=1e-12, atol=1e-12)
    # Two MoE layers of balance loss, each about one and weighted 0.01.
    assert 0.01 < scored.aux_loss.item() < 0.08


@pytest.mark.parametrize("called", [False, True], ids=["chunked", "all-logits"])
@pytest.mark.parametrize("padded", [False, True])
def test_targets_of_minus_100_are_not_scored_and_their_tokens_are_read(
    padded: bool, called: bool
) -> None:
    model, tokens, targets = trained("adaptive"), draw(0, 3, 7), draw(1, 3, 7)
    targets[:, :3] = -100  # a prompt whose continuation is learned
    mask = torch.arange(7) < torch.tensor([[7], [6], [5]]) if padded else None
    with torch.no_grad():
        logits = model(tokens, token_mask=mask).logits
    if called:
        model.unembed.register_forward_hook(lambda *_: None)
    scored = model(tokens, targets, token_mask=mask)
    kept = targets if mask is None else targets.masked_fill(~mask, -100)
    expected = F.cross_entropy(logits.flatten(0, 1), kept.flatten(), ignore_index=-100)
    torch.testing.assert_close(scored.loss, expected, rtol=1e-12, atol=1e-12)
    other = tokens.clone()
    other[:, 0] = (tokens[:, 0] + 1) % VOCAB
    assert model(other, targets, token_mask=mask).loss != scored.loss


def test_ids_of_32_bits_have_the_loss_of_64_if_the_output_layer_is_called() -> None:
    model, tokens, targets = trained(), draw(0, 3, 7), draw(1, 3, 7)
    targets[0] = -100
    model.unembed.register_forward_hook(lambda *_: None)
    assert torch.equal(model(tokens.int(), targets.int()).loss, model(tokens, targets).loss)


def test_a_segment_without_scored_predictions_has_loss_0_and_no_gradient() -> None:
    model, tokens = trained(), draw(0, 2, 5)
    loss = model(tokens, torch.full_like(tokens, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_balance_is_one_override_away_from_nothing() -> None:
    assert trained(balance=0.0)(draw(0, 2, 6)).aux_loss.item() == 0


def test_forward_leaves_model_and_memory_as_they_were() -> None:
    model = trained("adaptive").train()
    memory = model(draw(5, 2, 4)).memory
    held = [hidden.clone() for hidden in memory.hidden]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first = model(draw(6, 2, 5), memory=memory).logits
    assert torch.equal(model(draw(6, 2, 5), memory=memory).logits, first)
    assert all(torch.equal(*pair) for pair in zip(memory.hidden, held, strict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@mostly_slow(
    "router", ["smoe", "adaptive", CAUSAL["prefix"]], ids=["smoe", "adaptive", "prefix"], keep=(2,)
)
def test_checkpointed_blocks_give_the_same_gradients_with_two_forwards_in_flight(
    router: str | RouterConfig,
) -> None:
    plain = trained(router, dropout=0.2).train()
    frugal = copy.deepcopy(plain)
    frugal.checkpoint_blocks = True
    for model in (plain, frugal):
        torch.manual_seed(7)
        outs = [model(draw(seed, 2, 6), draw(seed + 1, 2, 6)) for seed in (11, 13)]
        sum(out.loss + out.aux_loss for out in outs).backward()
    for (name, one), (_, other) in zip(
        plain.named_parameters(), frugal.named_parameters(), strict=True
    ):
        if one.requires_grad:
            assert one.grad is not None and other.grad is not None, name
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("no_native")
def test_checkpointed_blocks_may_run_twice_in_one_region_of_autocast() -> None:
    """The region keeps cast weights for its second call; blocks that run again have none."""
    plain = trained("adaptive", dropout=0.2).float().train()
    frugal = copy.deepcopy(plain)
    frugal.checkpoint_blocks = True
    gradients = []
    for model in (plain, frugal):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=model is frugal):
            first = model(draw(11, 2, 6), draw(12, 2, 6))
            second = model(draw(13, 2, 6), draw(14, 2, 6), memory=first.memory)
            assert torch.is_autocast_cache_enabled() == (model is frugal)
        (first.loss + second.loss).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 20
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_routings_are_one_per_moe_layer_and_only_when_asked_for() -> None:
    model, tokens = trained("adaptive"), draw(12, 2, 5)
    assert model(tokens).routings is None
    routings = model(tokens, return_routings=True).routings
    assert [tuple(routing.expert_ids.shape) for routing in routings] == [(10, 2)] * 2
    assert [tuple(routing.affinity.shape) for routing in routings] == [(10, 4)] * 2
    assert model(tokens).routings is None  # nothing was left behind


def test_routings_are_those_of_the_call_and_not_of_another_thread() -> None:
    model, tokens = trained("adaptive"), draw(12, 2, 5)
    alone = model(tokens, return_routings=True).routings

    def call_elsewhere(*_: Any) -> None:
        handle.remove()
        other = Thread(target=model, args=(draw(13, 3, 4),))
        other.start()
        other.join()

    handle = model.blocks[-1].register_forward_pre_hook(call_elsewhere)
    routings = model(tokens, return_routings=True).routings
    assert len(routings) == len(alone) == 2
    for found, expected in zip(routings, alone, strict=True):
        assert torch.equal(found.affinity, expected.affinity)


def test_the_routing_state_reaches_the_second_moe_layer_through_the_dense_block() -> None:
    # Same weights: layer 1 routes alike, layer 2 in another space.
    plain, adaptive = trained("smoe"), trained("adaptive")
    tokens = draw(13, 2, 9)
    one = plain(tokens, return_routings=True).routings
    other = adaptive(tokens, return_routings=True).routings
    assert torch.equal(one[0].affinity, other[0].affinity)
    assert not torch.allclose(one[1].affinity, other[1].affinity)


def test_placement_chooses_the_adaptive_layers() -> None:
    model = LanguageModel(config("adaptive", repeats=4, placement="skip-1"))
    names = [type(layer.router).__name__ for layer in model.moe_layers()]
    assert names == ["TopKRouter", "TopKRouter", "AdaptiveRouter", "AdaptiveRouter"]


def test_a_model_without_moe_layers_is_a_plain_decoder() -> None:
    model = LanguageModel(config(layers=("ffn",)))
    out = model(draw(14, 2, 5), draw(15, 2, 5), return_routings=True)
    assert out.routings == ()
    assert out.aux_loss.item() == 0


@pytest.mark.parametrize("router", ["smoe", "adaptive", "stable", "hash", "random"])
def test_bfloat16_gives_finite_losses_and_gradients(router: str) -> None:
    torch.manual_seed(0)
    tokens, targets = draw(16, 2, 9), draw(17, 2, 9)
    half = LanguageModel(config(router)).bfloat16()
    mixed = LanguageModel(config(router))
    for model in (half, mixed):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model is mixed):
            out = model(tokens, targets)
        (out.loss + out.aux_loss).backward()
        assert out.loss.dtype == torch.float32
        assert 2.0 < out.loss.item() < 6.0  # ln 23 = 3.1 for a guess
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model, tokens = trained("adaptive"), draw(18, 2, 6)
    twin = copy.deepcopy(model)
    before = model(tokens).logits
    assert torch.equal(twin(tokens).logits, before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    assert torch.equal(model(tokens).logits, before)


def test_a_training_step_never_holds_the_whole_logits() -> None:
    words = 2**15  # 2**22 logits at once are 128 tokens
    model = LanguageModel(config(vocab_size=words))
    with LargestTensor() as step:
        out = model(draw(19, 16, 32), draw(20, 16, 32))
        out.loss.backward()
    assert step.numel == 128 * words
    with LargestTensor() as whole, torch.no_grad():
        model(draw(19, 16, 32))
    assert whole.numel == 16 * 32 * words


@pytest.mark.filterwarnings("ignore")  # dynamo's own, about how it traces autograd functions
def test_blocks_compile_whole_and_share_graphs() -> None:
    torch._dynamo.reset()
    model = trained("smoe", layers=("moe",), repeats=3)
    expected = model(draw(21, 2, 6)).logits
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    for block in model.blocks:
        block.compile(fullgraph=True, backend=count)
    torch.testing.assert_close(model(draw(21, 2, 6)).logits, expected)
    # One for the first block, whose state carries no gradient yet, one for all the others.
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.full((1, 3), VOCAB)}, "tokens holds id 23"),
        ({"tokens": torch.full((1, 3), -1)}, "tokens holds id -1"),
        ({"targets": torch.full((2, 3), 99)}, "targets holds id 99.*, or be -100 where"),
        ({"targets": torch.full((2, 3), -1)}, "targets holds id -1.*, or be -100 where"),
        ({"tokens": torch.full((1, 3), -100)}, r"tokens holds id -100; ids must lie in \[0, 23\)$"),
        ({"targets": torch.zeros(2, 4, dtype=torch.int64)}, "targets have shape \\(2, 4\\)"),
        ({"token_mask": torch.ones(3, dtype=torch.bool)}, "token_mask have shape \\(3,\\)"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "tokens have shape \\(3,\\)"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)}, "tokens have shape \\(2, 0\\)"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.uint8)}, "tokens are torch.uint8.*tokens.long()"),
        ({"tokens": torch.zeros(2, 3)}, "tokens are torch.float32; pass whole numbers"),
        ({"tokens": [[0, 1, 2]]}, "tokens are a list; pass a tensor of ids"),
        ({"targets": torch.zeros(2, 3, dtype=torch.int16)}, "targets are torch.int16"),
        ({"targets": [[0, 1, 2]] * 2}, "targets is a list; pass a tensor with one entry per token"),
        ({"token_mask": [[True] * 3] * 2}, "token_mask is a list; pass a tensor with one entry"),
        ({"token_mask": torch.ones(2, 3)}, "token_mask has dtype torch.float32; pass a bool"),
    ],
)
def test_wrong_tokens_are_named(arguments: dict[str, Tensor], message: str) -> None:
    model = trained()
    with pytest.raises(UserError, match=message):
        model(**{"tokens": draw(0, 2, 3), **arguments})
