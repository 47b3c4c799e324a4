"""A block is its equations.

Shapes: B batch, L length, S memory, D features, F hidden units.
"""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from acmoe.config.routing import SMoEConfig
from acmoe.config.text.language import LanguageConfig
from acmoe.models.text.blocks import BLOCKS, Attention, Block, FeedForward
from acmoe.models.text.rotary import rotate
from acmoe.models.text.stack import BlockInputs
from acmoe.ops.attention.reference import window_attention_reference
from acmoe.routing.layer_plan import LayerPlan
from acmoe.routing.state import RoutingState

CONFIG = LanguageConfig(
    vocab_size=11,
    dim=8,
    heads=2,
    hidden=6,
    repeats=1,
    span=4,
    block=4,
    dropout=0.0,
    num_experts=4,
    router=SMoEConfig(bias=True),
)
MOE = LayerPlan(SMoEConfig(bias=True), None)


def block(placed: LayerPlan | None, **changes: object) -> Block:
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    made = BLOCKS[config.norm](config, placed).double()
    for norm in made.modules():
        if isinstance(norm, nn.LayerNorm):  # away from one and zero, so that each norm shows
            nn.init.normal_(norm.weight, 1.0, 0.3)
            nn.init.normal_(norm.bias, 0.0, 0.3)
    return made


def start(x: Tensor) -> RoutingState:
    return RoutingState.identity(num_tokens=x.shape[0] * x.shape[1], num_clusters=4, dim=8)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def table() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_attention_projects_without_bias_and_sees_memory(x: Tensor, table: Tensor) -> None:
    torch.manual_seed(0)
    attention = Attention(CONFIG).double()
    assert {name for name, _ in attention.named_parameters()} == {
        f"{part}.weight" for part in ("query", "key", "value", "output")
    }

    def heads(y: Tensor) -> Tensor:
        return torch.stack([y[..., :4], y[..., 4:]], dim=1)

    q = heads(x[:, -2:] @ attention.query.weight.T)
    k, v = heads(x @ attention.key.weight.T), heads(x @ attention.value.weight.T)
    seen = window_attention_reference(q, k, v, span=4, positions=table)
    expected = torch.cat([seen[:, 0], seen[:, 1]], dim=-1) @ attention.output.weight.T
    torch.testing.assert_close(
        attention(x[:, -2:], x, positions=table), expected, rtol=1e-10, atol=1e-12
    )
    turned = window_attention_reference(rotate(q, 3), rotate(k, 0), v, span=4)
    expected = torch.cat([turned[:, 0], turned[:, 1]], dim=-1) @ attention.output.weight.T
    torch.testing.assert_close(
        attention(x[:, -2:], x, positions=None), expected, rtol=1e-10, atol=1e-12
    )


def test_the_paper_s_moe_block_adds_its_input_twice(x: Tensor, table: Tensor) -> None:
    made = block(MOE)
    h = made.norm_attention(x + made.attention(x, x, positions=table))
    y, _ = made.layer(h, start(x))
    assert made.norm_inner is not None
    expected = made.norm_layer(h + made.norm_inner(h + y))
    found, _ = made(x, start(x), x, BlockInputs(table))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_paper_s_dense_block_adds_its_input_once(x: Tensor, table: Tensor) -> None:
    made = block(None)
    h = made.norm_attention(x + made.attention(x, x, positions=table))
    inner = torch.relu(h @ made.layer.up.weight.T + made.layer.up.bias)
    expected = made.norm_layer(h + inner @ made.layer.down.weight.T + made.layer.down.bias)
    found, _ = made(x, start(x), x, BlockInputs(table))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("placed", [MOE, None])
def test_the_modern_block_norms_what_goes_in(x: Tensor, placed: LayerPlan | None) -> None:
    made = block(placed, norm="pre", position="rope")
    memory = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    context = torch.cat([memory, x], dim=1)
    normed = made.norm_attention(context)
    h = x + made.attention(normed[:, -5:], normed, positions=None)
    inner = made.norm_layer(h)
    y = made.layer(inner) if placed is None else made.layer(inner, start(x))[0]
    found, _ = made(x, start(x), context, BlockInputs(None))
    torch.testing.assert_close(found, h + y, rtol=1e-12, atol=1e-12)


def test_a_dense_block_hands_the_routing_state_through(x: Tensor, table: Tensor) -> None:
    state = start(x)._replace(aux_loss=torch.tensor(3.0))
    _, after = block(None)(x, state, x, BlockInputs(table))
    assert after is state


@pytest.mark.parametrize(
    ("placed", "expected"),
    [
        # Probabilities of 2 x 2 heads, 5 queries and 5 keys; 2 x 5 tokens at 2 experts; the output.
        (MOE, [(4, 5, 5), (20, 6), (2, 5, 8)]),
        # Probabilities and hidden units; the output of a dense layer is not dropped.
        (None, [(4, 5, 5), (2, 5, 6)]),
    ],
)
def test_dropout_acts_on_probabilities_hidden_units_and_moe_output_alone(
    x: Tensor,
    table: Tensor,
    placed: LayerPlan | None,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = block(placed, dropout=0.3)
    shapes = []

    def record(y: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert p == 0.3 and training
        shapes.append(tuple(y.shape))
        return y

    monkeypatch.setattr(nn.functional, "dropout", record)
    made(x, start(x), x, BlockInputs(table.requires_grad_()))
    assert shapes == expected


def test_evaluation_drops_nothing(x: Tensor, table: Tensor) -> None:
    for placed in (MOE, None):
        dropping, keeping = block(placed, dropout=0.9).eval(), block(placed)
        found, _ = dropping(x, start(x), x, BlockInputs(table))
        assert torch.equal(found, keeping(x, start(x), x, BlockInputs(table))[0])


def test_a_dense_layer_is_linear_relu_linear() -> None:
    layer = FeedForward(dataclasses.replace(CONFIG, dim=2, hidden=1))
    with torch.no_grad():
        layer.up.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.up.bias.fill_(-1.0)
        layer.down.weight.copy_(torch.tensor([[3.0], [4.0]]))
        layer.down.bias.copy_(torch.tensor([0.5, 0.0]))
    # (1, 1): relu(1 + 2 - 1) = 2, so (6.5, 8). (-1, 0): relu(-2) = 0, so the bias.
    assert layer(torch.tensor([1.0, 1.0])).tolist() == [6.5, 8.0]
    assert layer(torch.tensor([-1.0, 0.0])).tolist() == [0.5, 0.0]
