"""GEMMs of a forward whose columns are an expert's rows, against float64.

D features, F hidden units, N rows, E experts.
"""

import functools

import pytest
import torch
from expert_cases import Layer
from pipeline_cases import NOBODY, assert_near, drawn, each_expert, noted, plan_of

from slow_cases import mostly_slow

# Rows of each expert: one; none; a part without extra rows, and with one; all of a part; one row
# more, in two parts; a whole tile; a tile and one row.
COUNTS = (1, 0, 128, 129, 160, 161, 256, 257)


@mostly_slow("hidden", [208, 128, 256], gpu=(1, 2))
def test_the_up_projection_is_its_product(hidden, device, hopper_launch):
    """Hidden units that are no multiple of a tile: the last tile overlaps its neighbour."""
    plan = plan_of(COUNTS, NOBODY, device, top_k=2)
    tokens = drawn(plan.num_rows // 2, 192, device=device)
    up = drawn(len(COUNTS), 2 * hidden, 192, device=device) / 14
    a_NF = hopper_launch.launch_columns(tokens, up, plan, gated=True)
    for expert, rows in each_expert(plan):
        h = tokens[plan.token[rows].long()].double() @ up[expert].double().T
        gate, other = h.bfloat16().double().split(hidden, dim=1)
        if len(gate):
            assert_near(a_NF[rows], torch.nn.functional.silu(gate) * other)
    assert plan.counter.item() == 0


@mostly_slow("outer", [272, 256, 512], gpu=(1, 2))
def test_the_down_projection_is_its_product(outer, device, hopper_launch):
    plan = plan_of(COUNTS, NOBODY, device)
    act_NF = drawn(plan.num_rows, 192, device=device)
    act_NF[sum(COUNTS) :] = torch.nan  # rows for no expert, which nobody writes
    down = drawn(len(COUNTS), outer, 192, device=device) / 14
    y_NO = hopper_launch.launch_columns(act_NF, down, plan, gated=False)
    for expert, rows in each_expert(plan):
        right = act_NF[rows].double() @ down[expert].double().T
        if len(right):
            assert_near(y_NO[rows], right)
    assert plan.counter.item() == 0


def _call(called, name, *_, **__):
    called.append(name)


@pytest.mark.parametrize(
    ("tokens", "dim", "name"),
    [(216, 2048, "up"), (217, 2048, "columns"), (297, 2048, "up"), (217, 1984, "up")],
)
def test_the_rows_of_an_average_expert_decide(tokens, dim, name, hopper_launch, monkeypatch):
    """More than 108 and up to 148 of them, of 4 experts with 2 choices a token."""
    from acmoe.ops.experts.hopper import up_choice
    from acmoe.ops.experts.triton.sizes import Sizes

    called = []
    monkeypatch.setattr(up_choice, "gluon_unsupported", lambda device: None)
    for one in ("up", "columns"):
        launched = functools.partial(_call, called, one)
        monkeypatch.setattr(hopper_launch, f"launch_{one}", launched)
    x, up = torch.zeros(tokens, dim).bfloat16(), torch.zeros(4, 256, dim).bfloat16()
    size = Sizes(tokens, dim, 128, 4, 2, "swiglu")
    up_choice.run_up(x, x, up, None, None, size, 0.0, x, keep=False)
    assert called == [name]


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_choice")
def test_a_forward_without_gradients_has_the_bits_of_one_with_them(monkeypatch):
    """With 128 rows an expert: in columns, against Triton's up projection."""
    from acmoe.ops.experts.hopper import launch

    called = []
    for name in ("launch_columns", "launch_rows"):
        monkeypatch.setattr(launch, name, noted(called, getattr(launch, name)))
    layer = Layer("swiglu", False, (1024, 2048, 768, 16, 2), "cuda")
    layer.mlp.bfloat16()
    layer.x, layer.gate = (
        layer.x.detach().bfloat16().requires_grad_(),
        layer.gate.detach().bfloat16(),
    )
    trained = layer.fused()
    assert called == ["launch_columns"]  # down
    with torch.no_grad():
        assert torch.equal(layer.fused(), trained)
    assert called == ["launch_columns"] * 3  # up and down
