"""The experts with gradients on a CPU: one autograd function.

The kernel `cpu` has the bits of the definition, the kernel `native` other sums in float32.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_loops import layer
from torch import Tensor

from acmoe.ops.dispatch import record_choices, use_backend
from acmoe.ops.experts import ExpertWeights, expert_mlp
from acmoe.ops.native.library import missing
from acmoe.ops.sort import Rows, sort_rows

Call = tuple[list[Tensor], Rows, list[list[int]]]  # leaves, rows, ids of each token's experts
ACTIVATIONS = ["relu", "gelu", "swiglu"]
KERNELS = ["cpu"] if missing() else ["cpu", "native"]


def call(
    activation: str,
    *,
    bias: bool = True,
    tokens: int = 7,
    dim: int = 5,
    hidden: int = 4,
    experts: int = 4,
    top_k: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Call:
    """Return x, gate, up, down and, if any, their biases, and where the rows go."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    width = 2 * hidden if activation == "swiglu" else hidden
    leaves = [normal(tokens, dim), normal(tokens, top_k).softmax(-1)]
    leaves += [normal(experts, width, dim), normal(experts, dim, hidden)]
    leaves += [normal(experts, width), normal(experts, dim)] if bias else []
    ids_TK = torch.randn(tokens, experts, generator=generator).topk(top_k).indices
    return leaves, sort_rows(ids_TK, experts), ids_TK.tolist()


def run(leaves: list[Tensor], rows: Rows, activation: str, *, kernel: str = "cpu") -> Tensor:
    x, gate, up, down, *biases = leaves
    up_bias, down_bias = biases or (None, None)
    weights = ExpertWeights(up, down, up_bias, down_bias)
    if kernel == "torch":
        return expert_mlp.definition(x, weights, rows, gate, activation=activation)
    with record_choices() as choices, use_backend(kernel):
        found = expert_mlp(x, weights, rows, gate, activation=activation, complete=True)
    assert choices[0].kernel == kernel
    return found


def assert_like_the_definition(found: list[Tensor], wanted: list[Tensor], kernel: str) -> None:
    """Compare float32 results of a kernel with those of the definition."""
    if kernel == "cpu":
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        return
    for one, other in zip(found, wanted, strict=True):
        error, size = (one - other).detach().abs().max(), other.detach().abs().max()
        assert error <= 1e-5 * max(1.0, float(size))


@given(
    tokens=st.integers(1, 20),
    dim=st.integers(1, 20),
    hidden=st.integers(1, 20),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    kernel=st.sampled_from(KERNELS),
    seed=st.integers(0, 99),
)
def test_the_gradients_are_those_of_a_loop_over_tokens(
    activation: str,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    kernel: str,
    seed: int,
    **sizes: Any,
) -> None:
    dtype = dtype if kernel == "cpu" else torch.float32
    sizes |= {"experts": experts, "top_k": min(top_k, experts), "seed": seed}
    leaves, rows, ids = call(activation, dtype=dtype, **sizes)
    upstream = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(seed + 1))
    leaves = [one.requires_grad_() for one in leaves]
    y = run(leaves, rows, activation, kernel=kernel)
    found = torch.autograd.grad(y, leaves, upstream.to(dtype))
    wide = [one.detach().double().requires_grad_() for one in leaves]
    names = ("up", "down", "up_bias", "down_bias")
    named = dict(zip(names, wide[2:], strict=False))
    expected = layer(wide[0], ids, [list(row) for row in wide[1]], named, activation)
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(y.double(), expected, **close)
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, **close)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_any_part_of_the_inputs_may_be_trained(activation: str, bias: bool, kernel: str) -> None:
    sizes = {"tokens": 24, "dim": 16, "hidden": 8}  # rows that torch's grouped GEMM takes
    leaves, rows, _ = call(activation, bias=bias, dtype=torch.float32, **sizes)
    for trained in ([0], [1], [2], [3], [0, 1], [1, 3], list(range(len(leaves))), [-1]):
        given = [one.detach().clone() for one in leaves]
        learned = [given[place].requires_grad_() for place in trained]
        results = []
        for name in (kernel, "torch"):
            y = run(given, rows, activation, kernel=name)
            results.append([y, *torch.autograd.grad(y.square().sum(), learned)])
        assert_like_the_definition(*results, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [31, 32, 33, 90])  # the kernel `native` takes another form at 32
def test_many_rows_of_one_expert(activation: str, kernel: str, tokens: int) -> None:
    sizes = {"tokens": tokens, "dim": 13, "hidden": 19, "experts": 1, "top_k": 1}
    leaves, rows, _ = call(activation, dtype=torch.float32, **sizes)
    leaves = [one.requires_grad_() for one in leaves]
    results = []
    for name in (kernel, "torch"):
        y = run(leaves, rows, activation, kernel=name)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert_like_the_definition(*results, "native")  # biases are added up in another order


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives(activation: str) -> None:
    leaves, rows, _ = call(activation, tokens=3, dim=3, hidden=2, experts=3)
    inputs = tuple(one.requires_grad_() for one in leaves)
    assert torch.autograd.gradcheck(lambda *given: run(list(given), rows, activation), inputs)
    assert torch.autograd.gradgradcheck(lambda *given: run(list(given), rows, activation), inputs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_second_and_batched_derivatives_in_float32(kernel: str) -> None:
    leaves, rows, _ = call("swiglu", tokens=3, dtype=torch.float32)
    inputs = [one.requires_grad_() for one in leaves]
    results = []
    for name in (kernel, "torch"):
        y = run(inputs, rows, "swiglu", kernel=name)
        once = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        twice = torch.autograd.grad(sum(one.square().sum() for one in once), inputs)
        y = run(inputs, rows, "swiglu", kernel=name)
        upstream = torch.eye(y.numel()).view(-1, *y.shape)
        rows_of_jacobian = torch.autograd.grad(y, inputs, upstream, is_grads_batched=True)
        results.append([*once, *twice, *rows_of_jacobian])
    assert_like_the_definition(*results, "native")  # both sum float32 in another order


def doubling(name: str, seen: list[str]) -> Callable[[Tensor], Tensor]:
    """A hook that doubles a gradient, and appends a name where it does."""

    def hook(grad: Tensor) -> Tensor:
        seen.append(name)
        return 2 * grad

    return hook


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gradient_that_records_is_that_of_a_layer_used_twice(kernel: str) -> None:
    """The second call's tokens come from the weights of the first; `down` is made of `up`.

    Each weight has a hook, which must see one gradient, with its whole value.
    """
    leaves, rows, _ = call("relu", tokens=3, dim=3, hidden=3, experts=3, dtype=torch.float32)
    found = {}
    for name, records in ((kernel, False), (kernel, True), ("torch", True)):
        x, gate, up, _, up_bias, down_bias = [one.clone().requires_grad_() for one in leaves]
        seen: list[str] = []
        up.register_hook(doubling("up", seen))
        up_bias.register_hook(doubling("bias", seen))
        given = [x, gate, up, up.mT.contiguous() * 2, up_bias, down_bias]
        once = run(given, rows, "relu", kernel=name)
        given[0] = once + x
        loss = run(given, rows, "relu", kernel=name).square().sum()
        grads = torch.autograd.grad(loss, [x, gate, up, up_bias, down_bias], create_graph=records)
        assert sorted(seen) == ["bias", "up"]
        found[name, records] = [grad.detach() for grad in grads]
    for one in ((kernel, True), ("torch", True)):
        for mine, other in zip(found[one], found[kernel, False], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_transposed_view_lies_as_its_memory_does() -> None:
    leaves, rows, _ = call("swiglu", dim=8, hidden=16, dtype=torch.float32)
    stored = [one.mT.contiguous().requires_grad_() for one in leaves[2:4]]
    views = [one.mT for one in stored]
    y = run([*leaves[:2], *views, *leaves[4:]], rows, "swiglu")
    found = torch.autograd.grad(y.square().sum(), [*views, *stored])
    assert all(one.stride() == view.stride() for one, view in zip(found, views, strict=False))
    plain = [one.detach().requires_grad_() for one in leaves[2:4]]
    y = run([*leaves[:2], *plain, *leaves[4:]], rows, "swiglu")
    for one, other in zip(found[:2], torch.autograd.grad(y.square().sum(), plain), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_may_change_in_place_before_the_backward(kernel: str) -> None:
    leaves, rows, _ = call("relu", dtype=torch.float32)
    learned = [one.requires_grad_() for one in leaves[1:]]
    y = run([leaves[0], *learned], rows, "relu", kernel=kernel)
    wanted = torch.autograd.grad(y.sum(), learned)
    x = leaves[0].clone()
    y = run([x, *learned], rows, "relu", kernel=kernel)
    x.add_(y.detach())  # a residual
    for one, other in zip(torch.autograd.grad(y.sum(), learned), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kernel", KERNELS)
def test_saved_tensors_may_come_back_with_other_strides(kernel: str) -> None:
    leaves, rows, _ = call("gelu", tokens=12, dim=8, hidden=8, dtype=torch.float32)
    inputs = [one.requires_grad_() for one in leaves]
    wanted = torch.autograd.grad(run(inputs, rows, "gelu", kernel=kernel).sum(), inputs)

    def spread(one: Tensor) -> Tensor:
        """The same numbers, with gaps between them and the dimensions in reversed order."""
        wide = one.new_zeros(*reversed(one.shape), 2)[..., 0].permute(*reversed(range(one.dim())))
        return wide.copy_(one.detach())

    with torch.autograd.graph.saved_tensors_hooks(spread, lambda one: one):
        y = run(inputs, rows, "gelu", kernel=kernel)
    for one, other in zip(torch.autograd.grad(y.sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_autograd_traces_the_backward_as_one_graph(kernel: str) -> None:
    leaves, rows, _ = call("swiglu", dtype=torch.float32)
    inputs = [one.requires_grad_() for one in leaves]
    y = run(inputs, rows, "swiglu", kernel=kernel).square().sum()
    wanted = torch.autograd.grad(y, inputs, retain_graph=True)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        found = torch.autograd.grad(y, inputs)
    torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(missing() is not None, reason="there is no C compiler")
def test_sums_over_many_rows_of_an_expert_lose_no_digits_in_c() -> None:
    """All 100,000 numbers are positive: one sum after another would be off by 3e-5."""
    leaves, rows, _ = call("relu", tokens=100_000, dim=4, hidden=4, experts=1, top_k=1)
    leaves = [one.abs() for one in leaves]
    grads = []
    for dtype, kernel in ((torch.float32, "native"), (torch.float64, "torch")):
        learned = [one.to(dtype).requires_grad_() for one in leaves]
        y = run(learned, rows, "relu", kernel=kernel)
        grads.append(torch.autograd.grad(y.sum(), learned[2:4]))
    for mine, exact in zip(*grads, strict=True):
        assert (mine.double() - exact).abs().max() < 2e-6 * exact.abs().max()
