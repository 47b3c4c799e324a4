"""An attention layer whose keys and values are one product, against the two it stands for.

Shapes: B streams, L queries, S positions of memory, D features.
"""

from typing import cast

import pytest
import torch
from torch import Tensor

from acmoe.config.routing import SMoEConfig
from acmoe.config.text.language import LanguageConfig
from acmoe.models.text import heads
from acmoe.models.text.blocks import Attention
from acmoe.models.text.cache import BlockCache
from acmoe.ops.dispatch import use_backend

B, S, L, D = 2, 20, 16, 24
CONFIG = LanguageConfig(  # heads of 12 features, filled up to 16
    vocab_size=11,
    dim=D,
    heads=2,
    hidden=6,
    repeats=1,
    span=S,
    block=L,
    dropout=0.0,
    num_experts=4,
    router=SMoEConfig(bias=True),
)
# On a GPU the kernels multiply numbers of 16 bits; two roundings of 2^-9 apart, and sums of such.
TOLERANCE = {"cpu": 1e-5, "cuda": 0.02}


def draw(*shape: int, seed: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator).to(device)
    return drawn if device == "cpu" else drawn.bfloat16()


def layer(device: str) -> Attention:
    torch.manual_seed(0)
    made = Attention(CONFIG).to(device)
    return made if device == "cpu" else made.bfloat16()


def outcome(
    attention: Attention, device: str, *, memory: bool, compiled: bool = False
) -> list[Tensor]:
    """Output, and gradients of the inputs, the positions and the four weights."""
    call = attention.forward
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    past, upstream = (draw(B, n, D, seed=n, device=device) for n in (S, L))
    segment = draw(B, L, D, seed=1, device=device).requires_grad_()
    table = draw(D // 2, S, seed=2, device=device).requires_grad_()
    source = torch.cat([past, segment.detach() if memory else segment], dim=1)
    out = call(source, L, table=table, segment=segment if memory else None)
    leaves = [segment, table, *attention.parameters()]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("memory", [True, False])  # the gradient of a segment alone, and of all
def test_one_product_gives_output_and_gradients_of_two(memory: bool, device: str) -> None:
    attention = layer(device)
    found, expected = [], []
    for name, into in (("triton", found), ("torch", expected)):
        with use_backend(name):
            into += outcome(attention, device, memory=memory)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= TOLERANCE[device] * other.norm()


def test_keys_and_values_are_one_product_where_the_kernels_read_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, rows = layer(device), []

    def note(name: str) -> None:
        real = getattr(heads, name)

        def noted(source: Tensor, segment: Tensor, *weights: Tensor) -> object:
            rows.extend(weight.shape[0] for weight in weights)
            return real(source, segment, *weights)

        monkeypatch.setattr(heads, name, noted)

    note("project")
    note("project_both")
    seen: list[Tensor] = []
    handle = attention.key.register_forward_hook(
        lambda _, given, out: seen.extend(out if isinstance(out, tuple) else [out])
    )
    for name, expected in (("triton", [2 * 2 * 16, D]), ("torch", [D, D, D])):
        rows.clear()
        with use_backend(name):
            outcome(attention, device, memory=True)
        assert rows == expected
    handle.remove()
    # Whoever watches the layers for a number that is not finite sees the keys either way.
    assert [out.shape for out in seen] == [(B, S + L, 64), (B, L, D), (B, S + L, D)]


def test_a_cache_holds_heads_without_the_zeros(device: str) -> None:
    attention, source = layer(device), draw(B, L, D, seed=3, device=device)
    table = draw(D // 2, S, seed=2, device=device)
    with use_backend("triton"), torch.no_grad():
        cache = BlockCache(S, None)
        found = attention(source, L, table=table, cache=cache)
        expected = attention(source, L, table=table)
    assert (found - expected).norm() <= TOLERANCE[device] * expected.norm()
    storage = cast(Tensor, cache._keys.storage)
    assert storage.shape[-1] == D // 2


@pytest.mark.filterwarnings("default")  # the compiler's own, not ours
def test_a_compiled_layer_is_one_graph_and_gives_the_same(device: str) -> None:
    attention = layer(device)
    with use_backend("triton"):
        found = outcome(attention, device, memory=True, compiled=True)
        expected = outcome(attention, device, memory=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
