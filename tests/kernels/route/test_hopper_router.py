"""The router's Hopper kernels, emulated on a CPU, against float64.

T tokens, D features, E experts, C clusters. T and E are no multiple of a tile, and a program has
two tiles. Cluster C - 1 is empty, and some tokens are in none.
"""

import itertools
from typing import Any

import pytest
import torch
from route_cases import fused_route, split

from slow_cases import mostly_slow

pytest.importorskip("triton.experimental.gluon")

T, D, E, C = 150, 192, 304, 5


@pytest.fixture
def affinities(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function of the arguments of `drawn` by the kernel; it is emulated on a CPU."""
    from acmoe.ops.route.hopper import affinity, launch, scales
    from acmoe.ops.route.triton.tokens import Tokens

    if not torch.cuda.is_available():
        from gluon_emulator import emulate, register_asm

        register_asm(scales.SPLIT_ASM.value, split)
        monkeypatch.setattr(affinity, "affinity_kernel", emulate(affinity.affinity_kernel, seed=1))

    def run(x, embedding, scale=None, assignment=None, bias=None, noise=None, kept=None):
        found = torch.full((len(x), len(embedding)), float("nan"), device=x.device)
        tokens = Tokens.of(x, scale, assignment, None, None, None)
        launch.launch_affinities(tokens, embedding, bias, noise, found, kept)
        return found

    return run


def drawn(generator: torch.Generator, device: str) -> dict[str, torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    return {
        "x": normal(T, D).bfloat16(),
        "embedding": (normal(E, D) / D**0.5).bfloat16(),
        "scale": normal(C, D).exp(),
        "assignment": torch.randint(-1, C, (T,), generator=generator).to(device),
        "bias": normal(E),
        "noise": normal(T, E),
    }


def test_the_affinities_are_those_of_float64(
    affinities: Any, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device)
    case["assignment"][7] = C + 3  # a cluster that is not there
    own = case["assignment"]
    has_scale = ((own >= 0) & (own < C))[:, None]
    scale_TD = torch.where(has_scale, case["scale"].double()[own.clamp(0, C - 1)], 1.0)
    y_TD = case["x"].double() * scale_TD
    wanted = y_TD @ case["embedding"].double().T + case["bias"] + case["noise"]
    # A bf16x2 split is off by 2^-18 of each product at most; float32 sums add as much.
    lost = 2.0**-17 * (y_TD.abs() @ case["embedding"].double().abs().T) + 2.0**-21
    assert ((affinities(**case) - wanted).abs() <= lost).all()


def test_a_scale_of_one_and_no_scale_give_the_same_bits(
    affinities: Any, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device)
    case["scale"] = torch.ones_like(case["scale"])
    plain = affinities(case["x"], case["embedding"])
    assert torch.equal(affinities(**case | {"bias": None, "noise": None}), plain)


def test_a_bad_token_is_seen_and_harms_no_other(
    affinities: Any, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device)
    clean = affinities(**case)
    case["x"][3, 9], case["x"][77, 0] = float("nan"), float("inf")
    found = affinities(**case)
    bad = torch.tensor([3, 77], device=device)
    assert not found[bad].isfinite().any()
    found[bad] = clean[bad]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("experts", [E, 136])
def test_the_kernel_keeps_the_rescaled_tokens_and_changes_no_affinity(
    experts: int, affinities: Any, generator: torch.Generator, device: str
) -> None:
    """E experts are two tiles, which take turns with the blocks of 64 features; 136 are one."""
    case = drawn(generator, device) | {"bias": None, "noise": None}
    case["embedding"] = case["embedding"][:experts].contiguous()
    own = case["assignment"]
    scale_TD = torch.where((own >= 0)[:, None], case["scale"][own.clamp(min=0)], 1.0)
    behind = torch.full((T + 1, D), float("nan"), dtype=torch.bfloat16, device=device)
    found = affinities(**case, kept=behind[:T])
    assert torch.equal(behind[:T], (case["x"].float() * scale_TD).bfloat16())
    assert behind[T].isnan().all()  # the last tile ends behind T
    assert torch.equal(found, affinities(**case))


@pytest.mark.parametrize(
    ("learns", "records", "wanted", "kept"),
    [
        (True, True, "auto", 1),
        (False, True, "auto", 0),
        (True, False, "auto", 0),
        (True, True, "never", 0),
    ],
)
def test_the_embedding_s_gradient_reads_the_tokens_that_the_forward_pass_kept(
    learns: bool,
    records: bool,
    wanted: str,
    kept: int,
    affinities: Any,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
    device: str,
) -> None:
    """Nothing is kept for an embedding that does not learn, without autograd, or by the option."""
    from acmoe.ops.route.hopper import launch
    from acmoe.ops.route.triton import backward, many_experts, route

    written: list[torch.Tensor] = []
    launch_affinities = launch.launch_affinities

    def launched(*args: Any) -> None:
        launch_affinities(*args)
        written.extend(one for one in args[5:] if one is not None)

    def rescaled_again(*_: Any) -> None:
        raise AssertionError("the tokens are rescaled a second time")

    monkeypatch.setenv("ACMOE_KEEP_ROUTER", wanted)
    monkeypatch.setattr(launch, "launch_affinities", launched)
    # So few tokens would be served by other kernels.
    monkeypatch.setattr(route, "range_size", lambda *_: D)
    monkeypatch.setattr(many_experts, "hopper_unsupported", lambda *_: None)
    monkeypatch.setattr(backward, "worth_rescaling", lambda *_: True)
    monkeypatch.setattr(backward, "rescaled", rescaled_again)
    case = drawn(generator, device)
    own, x = case["assignment"], case["x"].requires_grad_()
    embedding = case["embedding"].requires_grad_(learns)
    with torch.set_grad_enabled(records):
        found = fused_route(x, embedding, None, case["scale"], own, 3, True)
    assert len(written) == kept
    if kept > 0:
        grad_TE = torch.randn(T, E, generator=generator).to(device)
        (grad,) = torch.autograd.grad(found.affinity, embedding, grad_TE)
        scale_TD = torch.where((own >= 0)[:, None], case["scale"].double()[own.clamp(min=0)], 1.0)
        y_TD = x.detach().double() * scale_TD
        # Rounding to bf16 moves x * scale and the sums by 2^-8 of themselves at most.
        exact = grad_TE.double().T @ y_TD
        allowed = 2.0**-8 * (grad_TE.double().abs().T @ y_TD.abs() + exact.abs()) + 1e-4
        assert ((grad.double() - exact).abs() <= allowed).all()


@mostly_slow("tokens", [T, 1], gpu=(1,))
def test_the_gradient_of_tokens_is_that_of_float64(
    tokens: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator, device: str
) -> None:
    """T tokens end in the upper half of the second tile; its lower half is not stored.

    One program computes all four tiles, so that each consumer uses its buffers twice.
    """
    from acmoe.ops.route.hopper import launch, token_gradient
    from acmoe.ops.route.triton.tokens import Tokens

    monkeypatch.setattr(launch, "multiprocessors", lambda: 1)
    if not torch.cuda.is_available():
        from gluon_emulator import emulate

        kernel = emulate(token_gradient.token_gradient_kernel, seed=1)
        monkeypatch.setattr(token_gradient, "token_gradient_kernel", kernel)
    case = drawn(generator, device)
    own, x = case["assignment"][:tokens], case["x"][:tokens]
    grad = torch.randn(tokens, E, generator=generator).to(device)
    high = grad.bfloat16()
    parts = torch.stack([high, (grad - high.float()).bfloat16()])
    addend = torch.randn(tokens, D, generator=generator).bfloat16().to(device)
    unscaled = parts.double().sum(0) @ case["embedding"].double()
    scale = torch.where((own >= 0)[:, None], case["scale"].double()[own.clamp(min=0)], 1.0)
    for how, others in itertools.product(((case["scale"], own), (None, None)), (addend, None)):
        given = Tokens.of(x, *how, None, None, None)
        found = launch.launch_token_gradient(given, parts, case["embedding"], others)
        wanted = unscaled if how[0] is None else unscaled * scale
        wanted = wanted if others is None else wanted + others.double()
        # Rounding to bf16 moves a number by 2^-8 of itself at most, and float32 sums add little.
        allowed = 2.0**-8 * wanted.abs() + 1e-4
        assert ((found.double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": torch.zeros(8192, 96, dtype=torch.bfloat16)}, "not 8192, 96"),
        ({"x": torch.zeros(8191, 64, dtype=torch.bfloat16)}, "not 8191, 64"),
        ({"x": torch.zeros(8192, 64)}, "it takes bfloat16, not torch.float32"),
        ({"mask": torch.ones(8192, dtype=torch.bool)}, "without a mask"),
        ({"permutation": torch.arange(8192), "end": torch.arange(5)}, "in their own order"),
        ({"embedding": torch.zeros(300, 64, dtype=torch.bfloat16)}, "not 300"),
        ({}, "a CUDA device"),
    ],
)
def test_other_calls_say_why_another_kernel_serves_them(
    change: dict[str, torch.Tensor], reason: str
) -> None:
    from acmoe.ops.route.hopper.choice import hopper_unsupported
    from acmoe.ops.route.triton.tokens import Tokens

    case = {"x": torch.zeros(8192, 64, dtype=torch.bfloat16), "scale": torch.ones(4, 64)}
    case |= {"assignment": torch.zeros(8192, dtype=torch.int64), "mask": None}
    case |= {"permutation": None, "end": None} | change
    embedding = case.pop("embedding", torch.zeros(304, 64, dtype=torch.bfloat16))
    found = hopper_unsupported(Tokens.of(**case), embedding)
    assert found is not None and reason in found
