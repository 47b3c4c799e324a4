"""The experts themselves: initialisation, dropout, rows that belong to nobody.

D features, F hidden units, E experts.
"""

import pytest
import torch

from acmoe import UserError
from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.sort import sort_rows


def test_experts_start_within_their_own_fan_in():
    # Each of up (F x D = 40 x 25) is uniform in +-1/5, each of down (25 x 40) in +-1/sqrt(40).
    torch.manual_seed(0)
    experts = ExpertMLP(dim=25, hidden=40, num_experts=3)
    for weight, bound in ((experts.up, 1 / 5), (experts.down, 40**-0.5)):
        assert weight.abs().max() <= bound
        assert weight.abs().amax((1, 2)).min() > 0.98 * bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert (experts.up_bias == 0).all()
    assert (experts.down_bias == 0).all()


def test_the_published_initialisation_is_too_small_by_the_square_root_of_the_outputs():
    torch.manual_seed(0)
    experts = ExpertMLP(dim=25, hidden=40, num_experts=3, init="published")
    bound = (40 * 25) ** -0.5
    for weight in (experts.up, experts.down):
        assert 0.98 * bound < weight.abs().max() <= bound


def test_swiglu_has_two_hidden_matrices_and_no_bias_none():
    experts = ExpertMLP(dim=3, hidden=4, num_experts=2, activation="swiglu", bias=False)
    assert experts.up.shape == (2, 8, 3)
    assert experts.down.shape == (2, 3, 4)
    assert len(list(experts.parameters())) == 2


def test_dropout_zeroes_its_share_of_hidden_units_in_training_alone():
    # Hidden units are all 1 (bias 1, weights 0) and are summed: y = kept units / (1 - p).
    experts = ExpertMLP(dim=1, hidden=5, num_experts=2, dropout=0.25)
    with torch.no_grad():
        experts.up.zero_()
        experts.up_bias.fill_(1.0)
        experts.down.fill_(1.0)
    torch.manual_seed(0)
    order = sort_rows(torch.arange(4000)[:, None] % 2, 2)
    gate = torch.ones(4000, 1)
    kept = experts(torch.ones(4000, 1), order, gate)[:, 0] * 0.75
    torch.testing.assert_close(kept, kept.round())
    # 20000 units: the share kept has deviation sqrt(0.25 * 0.75 / 20000) = 0.0031.
    assert abs(kept.mean().item() / 5 - 0.75) < 5 * 0.0031
    experts.eval()
    assert torch.equal(experts(torch.ones(4000, 1), order, gate), torch.full((4000, 1), 5.0))


def test_rows_without_a_gate_are_refused_and_so_is_a_gate_without_rows():
    experts, x = ExpertMLP(dim=2, hidden=3, num_experts=2), torch.ones(2, 2, 2)
    for given in ({"rows": sort_rows(torch.zeros(2, 1).long(), 2)}, {"gate_TK": torch.ones(2, 1)}):
        with pytest.raises(UserError, match="give rows and gate_TK together, or neither"):
            experts(x, **given)


def test_a_row_of_no_expert_stays_zero_in_spite_of_biases():
    experts = ExpertMLP(dim=2, hidden=3, num_experts=2)
    with torch.no_grad():
        experts.up_bias.fill_(1.0)
        experts.down_bias.fill_(7.0)
    order = sort_rows(torch.tensor([[2], [0], [2]]), 2)
    y = experts(torch.ones(3, 2), order, torch.ones(3, 1))
    assert torch.equal(y[[0, 2]], torch.zeros(2, 2))
    assert (y[1] != 0).all()
    y.sum().backward()
    assert experts.down_bias.grad.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 0}, r"hidden=0; it must be at least 1"),
        ({"hidden": 4.5}, r"hidden=4.5; it must be a whole number"),
        ({"dropout": 1.0}, r"dropout=1.0; it must lie in \[0, 1\)"),
        ({"activation": "tanh"}, r"activation='tanh' is unknown; choose one of relu, gelu, swiglu"),
        ({"init": "zeros"}, r"init='zeros' is unknown; choose fan_in or published"),
    ],
)
def test_experts_that_cannot_be_built_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        ExpertMLP(**({"dim": 4, "hidden": 4, "num_experts": 2} | options))
