"""Calls that are made of few launches: balance losses, a dispersion in its place, a short sort."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("simulated_launches")  # each call is recorded on a tape


def test_the_balance_loss_of_a_call_without_gradient_is_that_of_its_definition(device: str) -> None:
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.route import ScaledTokens, route

    generator = torch.Generator().manual_seed(0)
    for tokens in (5, 150):  # one program computes it, or a launch after several
        x = torch.randn(tokens, 16, generator=generator)
        embedding = torch.randn(6, 16, generator=generator)
        share = (x.double() @ embedding.double().T / 0.7).softmax(-1).mean(0)
        chosen = (x.double() @ embedding.double().T).topk(2).indices
        load = torch.bincount(chosen.flatten(), minlength=6).double() / (2 * tokens)
        with torch.no_grad(), use_backend("triton"):
            given = ScaledTokens(x.to(device)), embedding.to(device), None
            options = {"top_k": 2, "over_selected": True, "temperature": 0.7}
            found = route(*given, **options, balance_weight=0.3)
            summed = route(*given, **options)
        assert found.gate_sum is None and found.load is None and summed.balance is None
        wanted = 0.3 * 6 * (share * load).sum()
        torch.testing.assert_close(found.balance.double().cpu(), wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(summed.load.double().cpu(), load * 2 * tokens)


@pytest.mark.parametrize("learns", [False, True])
def test_a_weight_that_changes_in_every_step_is_recorded_a_few_times(
    learns: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two weights have a tape each; all others share that of the weight 1, with the same bits."""
    from acmoe.ops.device import tape
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.route import ScaledTokens, op, route

    monkeypatch.setattr(op, "MOST_WEIGHTS", 2)
    monkeypatch.setattr(op, "_weights", set())
    tape.forget()
    generator = torch.Generator().manual_seed(0)
    x, embedding = (torch.randn(n, 16, generator=generator).to(device) for n in (150, 6))
    embedding.requires_grad_(learns)
    options = {"top_k": 2, "over_selected": True, "temperature": 0.7}
    found = {}
    with use_backend("triton"):
        for weight in (1, 0.3, 0.01, 0.007, 3.0):
            balance = route(
                ScaledTokens(x), embedding, None, **options, balance_weight=weight
            ).balance
            grad = torch.autograd.grad(balance, embedding)[0] if learns else balance
            found[weight] = balance.detach(), grad
    recorded = [key for key in tape._tapes if key[0].__name__ == "_run_tensors"]
    assert len(recorded) == 2 and op._weights == {1.0, 0.3}
    for weight, (balance, grad) in found.items():
        assert torch.equal(balance, weight * found[1][0])
        torch.testing.assert_close(grad, weight * found[1][1], rtol=1e-4, atol=1e-6)


def test_a_weight_of_more_digits_than_a_float_is_multiplied_once(device: str) -> None:
    """LossConfig takes any real number; 1/3 of numpy's longest type differs from its float."""
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.route import ScaledTokens, route

    x, embedding = torch.ones(4, 16, device=device), torch.zeros(2, 16, device=device)
    options = {"top_k": 1, "over_selected": False, "temperature": 1.0}
    weight = np.longdouble(1) / 3
    with torch.no_grad(), use_backend("triton"):
        found = route(ScaledTokens(x), embedding, None, **options, balance_weight=weight)
    assert abs(found.balance.item() - 1 / 3) < 1e-6  # every gate is 1/2: the loss itself is 1


@pytest.mark.parametrize("tokens_learn", [True, False])  # False: x is the input of the model
def test_the_balance_loss_of_a_recorded_call_has_the_gradient_of_its_definition(
    tokens_learn: bool, device: str
) -> None:
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.route import ScaledTokens, route

    generator = torch.Generator().manual_seed(0)
    for tokens in (5, 150):
        x = torch.randn(tokens, 16, generator=generator)
        embedding = torch.randn(6, 16, generator=generator)
        x64, embedding64 = (one.double().requires_grad_() for one in (x, embedding))
        affinity = x64 @ embedding64.T
        load = torch.bincount(affinity.topk(2).indices.flatten(), minlength=6) / (2 * tokens)
        wanted = 0.3 * 6 * ((affinity / 0.7).softmax(-1).mean(0) * load).sum()
        (3 * wanted + (x64 * 2).sum()).backward()
        x_on, embedding_on = (one.detach().clone().to(device) for one in (x, embedding))
        x_on.requires_grad_(tokens_learn)
        embedding_on.requires_grad_()
        options = {"top_k": 2, "over_selected": True, "temperature": 0.7, "balance_weight": 0.3}
        with use_backend("triton"):
            found = route(ScaledTokens(x_on), embedding_on, None, **options)
        assert found.gate_sum is None and found.load is None and found.balance is not None
        assert found.x.requires_grad == tokens_learn
        (3 * found.balance + (found.x * 2).sum()).backward()
        torch.testing.assert_close(found.balance.double().cpu(), wanted, rtol=1e-5, atol=0)
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(embedding_on.grad.double().cpu(), embedding64.grad, **close)
        if tokens_learn:
            torch.testing.assert_close(x_on.grad.double().cpu(), x64.grad, **close)
        else:
            assert x_on.grad is None


def test_a_call_without_balance_loss_has_the_gradient_of_its_gates(device: str) -> None:
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.route import ScaledTokens, route

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 16, generator=generator)
    embedding = torch.randn(6, 16, generator=generator)
    embedding64 = embedding.double().requires_grad_()
    chosen = (x.double() @ embedding64.T).topk(2).values.softmax(-1)
    chosen[:, 0].sum().backward()
    embedding = embedding.to(device).requires_grad_()
    with use_backend("triton"):
        found = route(ScaledTokens(x.to(device)), embedding, None, top_k=2, over_selected=True)
    assert found.gate_sum is None and found.load is None and found.balance is None
    found.gate[:, 0].sum().backward()
    torch.testing.assert_close(
        embedding.grad.double().cpu(), embedding64.grad, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("measure", ["mad", "std"])
def test_a_dispersion_without_gradient_is_written_where_it_is_wanted(
    measure: str, device: str
) -> None:
    from acmoe.ops.dispatch import use_backend
    from acmoe.ops.statistics.op import measure_dispersion

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 16, generator=generator)
    cluster = torch.tensor([0, 1, 1, 0, 2, 1, -1, 0, 1])
    into = torch.zeros(4, 16, device=device), torch.zeros(4, device=device)
    with use_backend("triton"):
        found = measure_dispersion(
            x.to(device), cluster.to(device), 4, measure=measure, token_mask=None, out=into
        )
    assert found[0] is into[0] and found[1] is into[1]
    assert all(one._version > 0 for one in into)  # autograd would notice
    assert into[1].tolist() == [3, 4, 1, 0]
    for c in range(4):
        own = x.double()[cluster == c]
        off = own - own.mean(0) if len(own) else own
        wanted = off.abs().mean(0) if measure == "mad" else off.square().mean(0).sqrt()
        if len(own) >= 2:
            torch.testing.assert_close(into[0][c].double().cpu(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rows", "most"), [(1, 512), (512, 512), (514, 512)])
def test_few_rows_and_many_are_sorted_alike(
    rows: int, most: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to `most` are sorted by one launch."""
    from acmoe.ops.sort.triton import sort
    from acmoe.ops.sort.triton.sort import sort_rows

    monkeypatch.setattr(sort, "FEW_ROWS", most)
    ids = torch.randint(0, 6, (rows, 1), generator=torch.Generator().manual_seed(rows))
    permutation, inverse, offsets, expert = (one.cpu() for one in sort_rows(ids.to(device), 5))
    wanted, order = ids.flatten().sort(stable=True)  # the id 5 means "no expert" and comes last
    assert torch.equal(expert, wanted) and torch.equal(permutation, order)
    assert torch.equal(inverse[order], torch.arange(rows))
    assert offsets.tolist() == [int((ids <= e).sum()) for e in range(5)]


def test_a_second_derivative_through_the_router_op_raises(device: str) -> None:
    """A gradient by a tape would have no derivative, without a word."""
    from acmoe.ops.route.autograd import route_op

    generator = torch.Generator().manual_seed(0)
    x, embedding = (torch.randn(n, 16, generator=generator).to(device) for n in (5, 6))
    x.requires_grad_()
    gate = route_op(x, embedding, None, None, None, 2, True, None, 1.0, None, None, None)[1]
    (first,) = torch.autograd.grad(gate[:, 0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.square().sum().backward()


@pytest.mark.parametrize("z", [0.0, 0.1])
def test_a_router_without_a_balance_loss_does_not_fill_a_zero(
    z: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acmoe import LossConfig, build_router
    from acmoe.ops.dispatch import use_backend

    x = torch.randn(9, 16, device=device)
    losses = LossConfig(balance=0.0, z=z)
    router = build_router("smoe", dim=16, num_experts=4, top_k=2, losses=losses).to(device)
    with torch.no_grad(), use_backend("torch"):
        wanted = router(x).loss
    monkeypatch.setattr(torch.Tensor, "new_zeros", None)  # a call of it would raise
    with torch.no_grad(), use_backend("triton"):
        found = router(x).loss
    torch.testing.assert_close(found, wanted)
    assert bool(found == 0) == (z == 0)
