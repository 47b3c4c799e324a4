"""A map of memory and segment whose gradient goes to the segment. B, N, L, D, A as in the op."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from acmoe.fast.projection import project, project_both

B, N, L, D, A = 2, 7, 3, 5, 4


def draw(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_segment_and_weight_get_the_gradients_of_a_linear_map_over_the_joined_tensor() -> None:
    memory, upstream = draw(B, N - L, D, seed=0), draw(B, N, A, seed=1)
    plain = [draw(B, L, D, seed=2).requires_grad_(), draw(A, D, seed=3).requires_grad_()]
    wanted = torch.cat([memory, plain[0]], dim=1) @ plain[1].T
    (wanted * upstream).sum().backward()

    segment, weight = (tensor.detach().clone().requires_grad_() for tensor in plain)
    source = torch.cat([memory, segment], dim=1)
    found = project(source, segment, weight)
    (found * upstream).sum().backward()
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip((segment, weight), plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_nothing_flows_to_the_source() -> None:
    source = draw(B, N, D, seed=0).requires_grad_()
    segment, weight = draw(B, L, D, seed=1), draw(A, D, seed=2).requires_grad_()
    project(source, segment, weight).sum().backward()
    assert source.grad is None and weight.grad is not None


def test_the_source_s_precision_is_that_of_the_product() -> None:
    source = draw(B, N, D, seed=0).bfloat16()
    segment = source[:, -L:].float().requires_grad_()
    weight = draw(A, D, seed=2).float().requires_grad_()
    found = project(source, segment, weight)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, source @ weight.bfloat16().T)
    found.sum().backward()
    assert segment.grad is not None and segment.grad.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_autocast_lowers_it_as_it_lowers_a_linear_map() -> None:
    source = draw(B, N, D, seed=0).float()
    segment = source[:, -L:].clone().requires_grad_()
    weight = draw(A, D, seed=2).float().requires_grad_()
    for call in (project, torch.compile(project, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            found = call(source, segment, weight)
            assert torch.equal(found, torch.nn.functional.linear(source, weight))
        segment_grad, weight_grad = torch.autograd.grad(found.sum(), (segment, weight))
        assert segment_grad.dtype == weight_grad.dtype == torch.float32


def test_a_compiled_call_gives_the_same() -> None:
    segment, weight = draw(B, L, D, seed=1).requires_grad_(), draw(A, D, seed=2).requires_grad_()
    source = torch.cat([draw(B, N - L, D, seed=0), segment.detach()], dim=1)
    compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
    gradients = [
        torch.autograd.grad((call(source, segment, weight) ** 2).sum(), (segment, weight))
        for call in (project, compiled)
    ]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_compiled_backward_reads_its_gradient_in_one_place() -> None:
    """The upstream gradient is not contiguous: the compiler would write a copy for each reader."""
    graphs: list[torch.fx.GraphModule] = []

    def noted(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=noted, bw_compiler=noted)
    segment, weight = draw(B, L, D, seed=1).requires_grad_(), draw(A, D, seed=2).requires_grad_()
    source = torch.cat([draw(B, N - L, D, seed=0), segment.detach()], dim=1)

    def turned(source: Tensor, segment: Tensor, weight: Tensor) -> Tensor:
        return project(source, segment, weight).unflatten(2, (-1, 2)).transpose(1, 2).relu()

    out = torch.compile(turned, fullgraph=True, backend=backend)(source, segment, weight)
    torch.autograd.grad(out, (segment, weight), torch.ones_like(out))
    nodes = [node for node in graphs[1].graph.nodes if node.op == "call_function"]
    (backward,) = [node for node in nodes if "project_backward" in str(node.target)]
    assert len(backward.args[0].users) == 1
    assert not [node for node in nodes if "mm" in str(node.target)]


@pytest.mark.parametrize("frozen", ["segment", "weight"])
def test_what_needs_no_gradient_is_given_none(frozen: str) -> None:
    segment, weight = draw(B, L, D, seed=1), draw(D, A, seed=2).T  # not contiguous
    source = torch.cat([draw(B, N - L, D, seed=0), segment], dim=1)
    leaf = (weight if frozen == "segment" else segment).requires_grad_()
    expected = torch.autograd.grad(
        (source @ weight.T if frozen == "segment" else segment @ weight.T).sum(), leaf
    )
    for call in (project, torch.compile(project, fullgraph=True, backend="aot_eager")):
        found = torch.autograd.grad(call(source, segment, weight).sum(), leaf)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_two_maps_give_the_segment_one_gradient(compiled: bool) -> None:
    memory, upstream, other = (
        draw(B, N - L, D, seed=0),
        draw(B, N, A, seed=1),
        draw(B, L, 6, seed=4),
    )
    plain = [draw(*shape, seed=2).requires_grad_() for shape in ((B, L, D), (A, D), (6, D))]
    joined = torch.cat([memory, plain[0]], dim=1)
    wanted = joined @ plain[1].T, plain[0] @ plain[2].T
    expected = torch.autograd.grad(wanted, plain, (upstream, other))

    call: Callable[..., Any] = project_both
    if compiled:
        call = torch.compile(project_both, fullgraph=True, backend="aot_eager")
    found = call(joined.detach(), *plain)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad(found, plain, (upstream, other))
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_of_two_maps_what_is_frozen_is_given_none(frozen: int) -> None:
    leaves = [draw(*shape, seed=2) for shape in ((B, L, D), (A, D), (6, D))]
    wanted = [leaf.requires_grad_() for place, leaf in enumerate(leaves) if place != frozen]
    segment, weight, other = leaves
    source = torch.cat([draw(B, N - L, D, seed=0), segment.detach()], dim=1)
    plain = torch.cat([source[:, :-L], segment], dim=1)
    expected = torch.autograd.grad(
        ((plain @ weight.T) ** 2).sum() + (segment @ other.T).sum(), wanted
    )
    every, newest = project_both(source, *leaves)
    found = torch.autograd.grad((every**2).sum() + newest.sum(), wanted)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_two_maps_are_taken_in_the_precision_of_what_they_read() -> None:
    source = draw(B, N, D, seed=0).float()
    segment = source[:, -L:].clone().requires_grad_()
    weights = [draw(rows, D, seed=2).float().requires_grad_() for rows in (A, 6)]
    with torch.autocast("cpu", torch.bfloat16):
        found = project_both(source, segment, *weights)
    assert {part.dtype for part in found} == {torch.bfloat16}
    gradients = torch.autograd.grad([part.sum() for part in found], [segment, *weights])
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_the_op_of_two_maps_keeps_torchs_contract() -> None:
    leaves = [draw(*shape, seed=2).requires_grad_() for shape in ((B, L, D), (A, D), (6, D))]
    source = draw(B, N, D, seed=0)
    op = torch.ops.acmoe.project_both.default
    torch.library.opcheck(op, (source, leaves[0].detach().clone(), *leaves))


@pytest.mark.parametrize("low", [False, True])
def test_a_backward_inside_autocast_keeps_the_precision_of_a_forward_outside(low: bool) -> None:
    # low: a source of 16 bits beside a segment of 32, for which all products are of 16 bits.
    dtype = torch.bfloat16 if low else torch.float32
    source = draw(B, N, D, seed=0).to(dtype)
    leaves = [source[:, -L:].float(), draw(A, D, seed=2).float(), draw(A + 1, D, seed=3).float()]
    results = []
    for inside in (False, True):
        segment, weight, other = (leaf.clone().requires_grad_() for leaf in leaves)
        found = project_both(source, segment, weight, other)
        assert {one.dtype for one in found} == {dtype}
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            torch.autograd.backward(found, [torch.ones_like(one) for one in found])
        results.append([leaf.grad for leaf in (segment, weight, other)])
    for one, again in zip(*results, strict=True):
        assert one is not None and again is not None
        assert one.dtype == torch.float32 and torch.equal(one, again)
