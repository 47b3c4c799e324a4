"""The fast runner's attention, whose keys and values are one GEMM, against the plain layer.

Shapes: B streams, L queries, S positions of memory, D features.
"""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from acmoe.config.routing import SMoEConfig
from acmoe.config.text.language import LanguageConfig
from acmoe.fast import accelerate
from acmoe.fast import text as runner
from acmoe.models.text.blocks import Attention
from acmoe.models.text.cache import BlockCache
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.stack import BlockInputs
from acmoe.ops.dispatch import use_backend
from slow_cases import mostly_slow

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
    attention: Attention, device: str, *, memory: bool, fast: bool = True, compiled: bool = False
) -> list[Tensor]:
    """Output, and gradients of the inputs, the positions and the four weights."""
    past, upstream = (draw(B, n, D, seed=n, device=device) for n in (S, L))
    segment = draw(B, L, D, seed=1, device=device).requires_grad_()
    table = draw(D // 2, S, seed=2, device=device).requires_grad_()
    detached = memory and fast
    context = torch.cat([past, segment.detach() if detached else segment], dim=1)
    call = runner.attend
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    if fast:
        out = call(attention, context, BlockInputs(table), L, segment if memory else None)
    else:
        out = attention(segment, context, positions=table)
    leaves = [segment, table, *attention.parameters()]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@mostly_slow("memory", [True, False])  # the gradient of a segment alone, and of all
def test_the_fast_attention_is_the_layer(memory: bool, backend: str, device: str) -> None:
    attention = layer(device)
    with use_backend("torch"):
        expected = outcome(attention, device, memory=memory, fast=False)
    with use_backend(backend):
        found = outcome(attention, device, memory=memory)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= TOLERANCE[device] * other.norm()


def test_keys_and_values_are_one_gemm_where_the_kernels_read_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, joined = layer(device), []
    real = runner.project_joined

    def noted(*arguments: Tensor, **options: Tensor) -> object:
        joined.append(True)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "project_joined", noted)
    for name, expected in (("triton", [True]), ("torch", [])):
        joined.clear()
        with use_backend(name):
            outcome(attention, device, memory=True)
        assert joined == expected


def test_a_cache_holds_heads_without_the_zeros(device: str) -> None:
    attention, x = layer(device), draw(B, L, D, seed=3, device=device)
    table = draw(D // 2, S, seed=2, device=device)
    with use_backend("triton"), torch.no_grad():
        cache = BlockCache(S, None)
        found = attention(x, x, positions=table, cache=cache)
        expected = attention(x, x, positions=table)
    assert (found - expected).norm() <= TOLERANCE[device] * expected.norm()
    storage = cast(Tensor, cache._keys.storage)
    assert storage.shape[-1] == D // 2


@pytest.mark.filterwarnings("default")  # the compiler's own, not ours
def test_a_compiled_attention_is_one_graph_and_gives_the_same(device: str) -> None:
    attention = layer(device)
    with use_backend("triton"):
        found = outcome(attention, device, memory=True, compiled=True)
        expected = outcome(attention, device, memory=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class LoRA(nn.Module):
    """A linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(3)
        self.adapter = nn.Parameter(torch.randn(base.weight.shape, generator=generator) / 4)
        self.adapter.data = self.adapter.data.to(base.weight)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.base(x) + x @ self.adapter.T)


def model_on(device: str) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(CONFIG).to(device).eval()
    accelerate(model)
    return model


@torch.no_grad()
def logits(model: LanguageModel, backend: str, device: str) -> Tensor:
    tokens = torch.arange(2 * L, device=device).view(2, L) % 11
    low = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    with use_backend(backend), low:
        return model(tokens).logits.float()


@mostly_slow("name", ["query", "key", "value", "output"], keep=(2,))
def test_hooks_fire_once_and_adapters_count_on_every_backend(name: str, device: str) -> None:
    model, calls = model_on(device), []
    plain = logits(model, "torch", device)
    attention = model.blocks[0].attention
    handle = getattr(attention, name).register_forward_hook(lambda *_: calls.append(name))
    found = {backend: logits(model, backend, device) for backend in ("torch", "triton")}
    assert calls == [name, name]  # once per call
    handle.remove()
    setattr(attention, name, LoRA(getattr(attention, name)))
    adapted = {backend: logits(model, backend, device) for backend in ("torch", "triton")}
    for one in (found, adapted):
        difference = (one["triton"] - one["torch"]).norm()
        assert difference <= TOLERANCE[device] * one["torch"].norm()
    assert (adapted["torch"] - plain).norm() > 0.05 * plain.norm()


def test_a_replaced_block_output_is_replaced_on_every_backend(device: str) -> None:
    model = model_on(device)
    other = torch.randn(2, L, D, generator=torch.Generator().manual_seed(5)).to(device)
    model.blocks[0].register_forward_hook(lambda block, given, out: (other, out[1]))
    found = {backend: logits(model, backend, device) for backend in ("torch", "triton")}
    expected = model.unembed(model.norm(other))  # one block: its output is all there is
    for one in found.values():
        assert (one - expected).norm() <= TOLERANCE[device] * expected.norm()
