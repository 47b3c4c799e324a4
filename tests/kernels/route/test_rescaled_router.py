"""Many experts: tokens are rescaled once, before the GEMMs (ops/route/triton/rescale.py).

T, D, C and K are those of route_cases.py, no multiple of a block; 40 experts count as many. Cluster
C - 1 is empty, and some tokens are in none.
"""

from typing import Any

import pytest
import torch
from route_cases import C, D, K, Route, T, fused_route, lost_by_terms, route_reference, wide

from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

E = 40  # in three blocks of sixteen


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let E experts be many; return a function that sets the fewest tokens that are rescaled."""
    from acmoe.ops.route.triton import (
        backward,
        backward_tiles,
        many_experts,
        rescale,
        route,
        route_tiles,
    )

    for module in (rescale, route, route_tiles, backward, backward_tiles):
        monkeypatch.setattr(module, "MANY_EXPERTS", E - 1)
    monkeypatch.setattr(many_experts, "AFFINITY_TILE", (32, 16, 4, 2))
    monkeypatch.setattr(rescale, "_FEATURES", 64)  # a row in two blocks
    return lambda tokens: monkeypatch.setattr(rescale, "FEWEST_TOKENS", tokens)


def drawn(
    generator: torch.Generator,
    device: str,
    dtype: torch.dtype,
    weight: torch.dtype,
    tokens: int = T,
) -> dict[str, Any]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    return {
        "x": normal(tokens, D).to(dtype).requires_grad_(),
        "embedding": (normal(E, D) / D**0.5).to(weight).requires_grad_(),
        "bias": normal(E),
        "scale": normal(C, D).exp(),
        "assignment": torch.randint(-1, C - 1, (tokens,), generator=generator).to(device),
    }


def gradients(found: Route, case: dict[str, Any], seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    results = [found.gate, found.affinity, found.gate_sum]
    upstream = [torch.randn(z.shape, generator=generator).to(z) for z in results]
    return torch.autograd.grad(results, [case["x"], case["embedding"]], upstream)


@mostly_slow(
    ("dtype", "weight", "masked", "tokens"),
    [
        (torch.bfloat16, torch.bfloat16, False, T),
        (torch.bfloat16, torch.float32, True, T),
        (torch.bfloat16, torch.bfloat16, False, 1),
        (torch.float16, torch.bfloat16, True, T),
        (torch.float16, torch.float32, False, T),
    ],
    keep=(1,),
)
def test_rescaled_tokens_give_the_bits_of_tokens_that_the_gemm_rescales(
    dtype: torch.dtype,
    weight: torch.dtype,
    masked: bool,
    tokens: int,
    many: Any,
    generator: torch.Generator,
    device: str,
) -> None:
    case = drawn(generator, device, dtype, weight, tokens)
    mask = (torch.rand(tokens, generator=generator) < 0.8).to(device) if masked else None
    if mask is not None:
        case["x"].data[~mask] = float("nan")  # padding may hold anything
    found, grads = [], []
    for fewest in (tokens + 1, tokens):
        many(fewest)
        found.append(fused_route(*case.values(), K, True, mask, 0.7))
        grads.append(gradients(found[-1], case))
    # Both make the same split. (A GPU's compiler may fuse its multiplication and subtraction in one
    # kernel and not in the other, which rounds the low part otherwise.)
    slack = 0.0 if device == "cpu" else 1e-5
    for name in ("expert_ids", "first", "load"):
        assert torch.equal(*(getattr(one, name) for one in found)), name
    for name in ("gate", "affinity", "gate_sum"):
        one, other = (getattr(one, name) for one in found)
        assert (one - other).abs().max() <= slack * other.abs().max(), name
    apart = (grads[0][0] - grads[1][0]).abs().max()
    assert apart <= (0.0 if device == "cpu" else torch.finfo(dtype).eps) * grads[0][0].abs().max()

    exact = wide(case)
    exact["x"].requires_grad_(), exact["embedding"].requires_grad_()
    wanted = route_reference(*exact.values(), K, True, mask, 0.7)
    allowed = 2e-6 * wanted.affinity.abs().max() + lost_by_terms(exact, dtype, mask)
    assert (found[1].affinity - wanted.affinity).abs().max() < allowed
    # A bf16 gradient is off by its own rounding, 2^-9 of it, and by that of x * scale.
    (_, wanted_grad) = gradients(wanted, exact)
    tolerance = 2e-5 if weight == torch.float32 else torch.finfo(weight).eps
    assert (grads[1][1] - wanted_grad).abs().max() < tolerance * wanted_grad.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_is_seen_and_harms_no_other(
    bad: float, many: Any, generator: torch.Generator, device: str
) -> None:
    many(1)
    case = drawn(generator, device, torch.bfloat16, torch.bfloat16, 5)
    clean = fused_route(*case.values(), K, True)
    case["x"].data[2, 9] = bad
    found = fused_route(*case.values(), K, True)
    assert not found.affinity[2].isfinite().any()
    assert len(set(found.expert_ids[2].tolist())) == K
    others = torch.tensor([0, 1, 3, 4], device=device)
    assert torch.equal(found.affinity[others], clean.affinity[others])


def test_a_scale_of_one_is_the_plain_router(
    many: Any, generator: torch.Generator, device: str
) -> None:
    many(1)
    case = drawn(generator, device, torch.bfloat16, torch.bfloat16)
    plain = fused_route(case["x"], case["embedding"], case["bias"], None, None, K, True)
    case["scale"] = torch.ones(C, D, device=device)
    ones = fused_route(*case.values(), K, True)
    assert all(torch.equal(one, other) for one, other in zip(ones, plain, strict=True))
    for one, other in zip(gradients(ones, case), gradients(plain, case), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("experts", "tokens", "dtype", "scaled", "wanted"),
    [
        (512, 1024, torch.bfloat16, True, True),
        (129, 1024, torch.float16, True, True),
        (128, 1024, torch.bfloat16, True, False),
        (512, 1023, torch.bfloat16, True, False),
        (512, 1024, torch.float32, True, False),
        (512, 1024, torch.bfloat16, False, False),
    ],
)
def test_many_tokens_of_16_bits_are_rescaled_for_many_experts(
    experts: int, tokens: int, dtype: torch.dtype, scaled: bool, wanted: bool
) -> None:
    from acmoe.ops.route.triton.rescale import worth_rescaling
    from acmoe.ops.route.triton.tokens import Tokens

    x, assignment = torch.zeros(tokens, 1, dtype=dtype), torch.zeros(tokens).long()
    how = (torch.ones(1, 1), assignment) if scaled else (None, None)
    assert worth_rescaling(Tokens.of(x, *how, None, None, None), experts) == wanted
