"""Sums and norms of a post-norm block by kernels, against torch's float64 form.

T tokens, D features.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from acmoe.ops.dispatch import use_backend
from acmoe.ops.norm import add_norm, add_norm_twice
from slow_cases import mostly_slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (3, 7, 44)  # 21 tokens: no multiple of a tile's rows, features no power of two


def draw(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPE, generator=generator).to(dtype)
    return x.to(DEVICE).requires_grad_()


def norm_of(seed):
    generator = torch.Generator().manual_seed(seed)
    norm = nn.LayerNorm(SHAPE[-1])
    nn.init.uniform_(norm.weight, 0.2, 2.0, generator=generator)
    nn.init.uniform_(norm.bias, -1.0, 1.0, generator=generator)
    return norm.to(DEVICE)


def summed(x, y, norm):
    return add_norm(x, y, norm).x


def gradients(call, tensors, norms):
    """Output, then gradients of tensors and of the norms' gains and biases, in float64."""
    out = call(*tensors, *norms)
    upstream = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9)).to(out)
    wanted = [*tensors, *(p for norm in norms for p in norm.parameters())]
    found = torch.autograd.grad(out, wanted, upstream)
    return [out.detach().double(), *(grad.double() for grad in found)]


def compare(kernel, plain, tensors, norms, *, atol):
    with use_backend("triton"):
        found = gradients(kernel, tensors, norms)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wide = [nn.LayerNorm(SHAPE[-1]).to(DEVICE).double() for _ in norms]
    for norm, copy in zip(norms, wide, strict=True):
        copy.load_state_dict(norm.state_dict())
    for ours, theirs in zip(found, gradients(plain, exact, wide), strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)


BRANCHES = [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]  # a gradient of 8 bits at its end


@mostly_slow(("branch", "atol"), BRANCHES)
def test_a_sum_and_its_norm_are_torchs(branch, atol):
    tensors = [draw(0), draw(1, branch)]
    compare(summed, lambda x, y, norm: norm(x + y), tensors, [norm_of(2)], atol=atol)


@mostly_slow(("branch", "atol"), BRANCHES)
def test_a_norm_around_a_norm_is_torchs(branch, atol):
    def kernel(x, y, inner, norm):
        return add_norm_twice(x, y, inner, norm).x

    def plain(x, y, inner, norm):
        return norm(x + inner(x + y))

    compare(kernel, plain, [draw(0), draw(1, branch)], [norm_of(2), norm_of(3)], atol=atol)


def test_a_program_of_many_rows_adds_their_gradients_up(monkeypatch):
    from acmoe.ops.norm.triton import launch as kernels

    monkeypatch.setattr(kernels, "_PROGRAMS", {"once": 4, "alias": 5, "twice": 3})  # of 21 rows
    tensors = [draw(0), draw(1)]
    compare(summed, lambda x, y, norm: norm(x + y), tensors, [norm_of(2)], atol=2e-5)
    compare(
        lambda x, y, inner, norm: add_norm_twice(x, y, inner, norm).x,
        lambda x, y, inner, norm: norm(x + inner(x + y)),
        tensors,
        [norm_of(2), norm_of(3)],
        atol=2e-5,
    )


def test_checkpointed_the_gradients_are_the_same():
    x, y, inner, norm = draw(0), draw(1), norm_of(2), norm_of(3)

    def both(x, y):
        return add_norm_twice(summed(x, y, norm), y, inner, norm).x

    with use_backend("triton"):
        outs = both(x, y), checkpoint(both, x, y, use_reentrant=False)
        found = [torch.autograd.grad(out.square().sum(), (x, y)) for out in outs]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_other_shapes_go_to_torch():
    x, norm = draw(0), norm_of(2)
    row = draw(1)[:1, :1].detach()
    with use_backend("triton"):
        torch.testing.assert_close(summed(x, row, norm), norm(x + row))


def test_dropout_takes_its_share_and_the_gradient_knows_which():
    x, y, inner, norm = draw(0), draw(1), norm_of(2), norm_of(3)
    torch.manual_seed(0)
    with use_backend("triton"):
        out = add_norm_twice(x, y, inner, norm, dropout=0.4).x
    (grad,) = torch.autograd.grad((out * draw(4).detach()).sum(), y)
    kept = grad != 0
    # 924 draws: 60% are kept, give or take 4 standard deviations of 1.6%.
    assert abs(kept.float().mean() - 0.6) < 0.065
    expected = norm(x + inner(x + torch.where(kept, y / 0.6, 0.0)))
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_every_call_drops_others():
    x, y, inner, norm = draw(0), draw(1), norm_of(2), norm_of(3)
    with use_backend("triton"):
        first, second = (add_norm_twice(x, y, inner, norm, dropout=0.4).x for _ in range(2))
    assert not torch.equal(first, second)


def test_compiled_it_is_one_graph_with_the_same_numbers():
    x, y, inner, norm = draw(0), draw(1), norm_of(2), norm_of(3)

    def both(x, y):
        return add_norm_twice(summed(x, y, norm), y, inner, norm).x

    with use_backend("triton"):
        plain = both(x, y)
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(x, y)
        assert torch.equal(compiled, plain)
        gradients = [torch.autograd.grad(out.square().sum(), (x, y)) for out in (plain, compiled)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


def test_the_lowered_copy_has_a_gradient_of_its_own():
    x, y, norm = draw(0), draw(1, torch.bfloat16), norm_of(2)
    first, second = draw(3).detach(), draw(4, torch.bfloat16).detach()
    with use_backend("triton"), torch.autocast(DEVICE, torch.bfloat16):
        out, lowered, _ = add_norm(x, y, norm)
    assert out.dtype == torch.float32 and lowered.dtype == torch.bfloat16
    # The interpreter cuts off what a GPU rounds.
    torch.testing.assert_close(lowered.float(), out, atol=1e-6, rtol=2**-7)
    found = torch.autograd.grad((out, lowered), (x, y), (first, second))
    expected = torch.autograd.grad(norm(x + y), (x, y), first + second)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-2)


@mostly_slow("compiled", [False, True])
@pytest.mark.parametrize("readers", [(0, 1), (0,), (1,)])  # of the sum, and of its lowered copy
def test_both_forms_of_the_second_sum_take_gradients(compiled, readers):
    x, y, inner, norm = draw(0), draw(1, torch.bfloat16), norm_of(2), norm_of(3)
    upstream = draw(4).detach(), draw(5, torch.bfloat16).detach()

    def twice(x, y):
        with torch.autocast(DEVICE, torch.bfloat16):
            return add_norm_twice(x, y, inner, norm)[:2]

    call = torch.compile(twice, fullgraph=True, backend="aot_eager") if compiled else twice
    with use_backend("triton"):
        outs = call(x, y)
        assert [out.dtype for out in outs] == [torch.float32, torch.bfloat16]
        # The interpreter cuts off what a GPU rounds.
        torch.testing.assert_close(outs[1].float(), outs[0], atol=1e-6, rtol=2**-7)
        wanted = (x, y, *inner.parameters(), *norm.parameters())
        read = [outs[which] for which in readers], [upstream[which] for which in readers]
        found = torch.autograd.grad(read[0], wanted, read[1])
    plain = norm(x + inner(x + y))
    expected = torch.autograd.grad(plain, wanted, sum(upstream[which] for which in readers))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)


@mostly_slow("compiled", [False, True])
def test_the_gradient_that_comes_by_an_alias_is_added_to_the_others(compiled):
    x, y, inner, norm = draw(0), draw(1, torch.bfloat16), norm_of(2), norm_of(3)
    weight = draw(4).detach()

    def block(x, y, aliased):
        with torch.autocast(DEVICE, torch.bfloat16):
            out, lowered, alias = add_norm(x, y, norm)
            assert alias is not None and alias.stride() == (0, 0)
            y = (out * weight).relu() + lowered  # two readers beside the second sum
            alias = alias if aliased else None
            return add_norm_twice(out, y, inner, norm, grad_alias=alias).x

    call = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    with use_backend("triton"):
        outs = call(x, y, True), block(x, y, False)
        assert torch.equal(*outs)
        wanted = (x, y, *norm.parameters(), *inner.parameters())
        found, expected = (torch.autograd.grad(out.square().sum(), wanted) for out in outs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_without_autocast_there_is_nothing_to_lower_to():
    x, y, norm = draw(0), draw(1), norm_of(2)
    out, lowered, alias = add_norm(x, y, norm)
    assert lowered is out and alias is None
    again, lowered, _ = add_norm_twice(x, y, norm, norm_of(3))
    assert lowered is again
