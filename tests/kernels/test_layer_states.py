"""The state between two layers on their kernels: cloned, sent, recomputed, compiled."""

import pytest
import torch
from layer_cases import NOISY_NAME, B, D, E, L, built
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import acmoe
from acmoe.ops.dispatch import use_backend
from acmoe.ops.recompute import recompute
from acmoe.ops.sort.order import no_order
from slow_cases import mostly_slow


def cloned(state):
    return acmoe.RoutingState(*(tensor.clone() for tensor in state))


def mapped(state):
    return pytree.tree_map(torch.clone, state)


def sent(state):
    """To another pipeline stage, which receives plain tensors."""
    flat = [tensor.detach().clone() for tensor in state]
    return acmoe.RoutingState(*flat)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # so does it, of Functions
@pytest.mark.parametrize(
    "way",
    [
        "mapped",
        pytest.param("checkpointed", marks=[] if torch.cuda.is_available() else pytest.mark.slow),
        pytest.param("cloned", marks=pytest.mark.slow),
        pytest.param("sent", marks=pytest.mark.slow),
        pytest.param("compiled layers", marks=pytest.mark.slow),
        pytest.param("compiled", marks=pytest.mark.slow),
    ],
)
def test_a_state_keeps_results_and_kernels_however_it_travels(
    way, device, monkeypatch, products_by_torch
):
    """Its tokens stay sorted for the next router when a state is cloned, mapped, sent to another
    pipeline stage, recomputed or compiled."""
    monkeypatch.setattr("acmoe.routing.next_state.worth_sorting", lambda tokens, clusters: True)
    from acmoe.ops.device import tape
    from acmoe.ops.route.triton import route as affinity

    seen, route = [], affinity.route

    def watched(tokens, *arguments, **options):
        seen.append(tokens.is_sorted)
        return route(tokens, *arguments, **options)

    monkeypatch.setattr(affinity, "route", watched)
    layers = built("batch, previous", device, num_experts=2, top_k=1)
    x = torch.randn(L, D, device=device, requires_grad=True)

    def run(x, calls, travel=lambda state: state):
        state = acmoe.RoutingState.identity(num_tokens=L, num_clusters=2, dim=D, device=device)
        for call in calls:
            y, state = call(x, travel(state))
            x = x + y
        return x

    def recomputed(layer):
        return lambda x, state: checkpoint(layer, x, state, use_reentrant=False)

    def compiled(function):
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    ways = {
        "cloned": lambda: run(x, layers, cloned),
        "mapped": lambda: run(x, layers, mapped),
        "sent": lambda: run(x, layers, sent),
        "checkpointed": lambda: run(x, [recomputed(layer) for layer in layers]),
        "compiled layers": lambda: run(x, [compiled(layer) for layer in layers]),
        "compiled": lambda: compiled(lambda x: run(x, layers))(x),
    }
    with use_backend("triton"):
        wanted = run(x, layers)
        (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), x)
        tape.forget()  # a repeated launch calls no Python
        seen.clear()
        found = ways[way]()
        assert seen == [False, True]  # the first layer has no sorted tokens before it
        (grad,) = torch.autograd.grad(found.square().sum(), x)
        assert torch.equal(found, wanted)
        torch.testing.assert_close(grad, wanted_grad)


@mostly_slow("name", ["batch, previous", NOISY_NAME])
def test_a_block_computed_again_keeps_the_choices_of_the_kernel(
    name, device, monkeypatch, products_by_torch
):
    from acmoe.ops.route.triton import route as affinity

    calls, route = [], affinity.route

    def counted(*arguments, **options):
        calls.append(arguments)
        return route(*arguments, **options)

    monkeypatch.setattr(affinity, "route", counted)
    layers = built(name, device)
    x = torch.randn(B * L, D, device=device, requires_grad=True)
    identity = acmoe.RoutingState.identity(num_tokens=B * L, num_clusters=E, dim=D, device=device)

    def gradients(call):
        calls.clear()
        torch.manual_seed(1)  # of the noise
        y, state = call(layers[0], x, identity)
        z, state = call(layers[1], x + y, state)
        return torch.autograd.grad(z.square().sum() + state.aux_loss, [x, *layers[1].parameters()])

    with use_backend("triton"):
        plain = gradients(lambda layer, *inputs: layer(*inputs))
        found = gradients(recompute)
    assert len(calls) == 2  # one a layer, none in the backward
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


def test_a_state_is_made_of_tensors_and_a_new_assignment_drops_the_old_order():
    state = acmoe.RoutingState.identity(num_tokens=4, num_clusters=2, dim=3)
    assert all(isinstance(field, torch.Tensor) for field in state)
    assert len(state) == len(state._fields) == 6
    order = torch.arange(3, dtype=torch.int32)
    state = state._replace(order=order)
    assert state._replace(scale=2 * state.scale).order is order
    assert state._replace(assignment=state.assignment + 1).order.numel() == 0
    assert torch.equal(no_order(order), torch.empty(0, dtype=torch.int32))
    mapped_state = pytree.tree_map(torch.clone, state)
    assert type(mapped_state) is acmoe.RoutingState
