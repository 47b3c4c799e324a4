"""The Hopper kernel that routes among 33 to 128 experts, emulated on a CPU, against float64.

T tokens, D features, E experts, C clusters. T is no multiple of a tile, and one program has both
tiles. Cluster C - 1 is empty, and some tokens are in none.
"""

from typing import Any

import pytest
import torch
from route_cases import Route, check_zero_loss, fused_route, route_reference, split
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

T, D, C = 150, 192, 5


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the kernel serve few tokens; it is emulated on a CPU.

    Returns the number of experts of each launch.
    """
    from acmoe.ops.route.hopper import choice, launch, router, scales

    monkeypatch.setattr(launch, "multiprocessors", lambda: 1)
    monkeypatch.setattr(choice, "fills_rounds", lambda _: True)
    monkeypatch.setattr(choice, "gluon_unsupported", lambda _: None)
    if not torch.cuda.is_available():
        from gluon_emulator import emulate, register_asm

        register_asm(scales.SPLIT_ASM.value, split)
        monkeypatch.setattr(router, "router_kernel", emulate(router.router_kernel, seed=1))
    served: list[int] = []
    launch_router = launch.launch_router

    def launched(tokens: Any, given: Any, *args: Any, **options: Any) -> None:
        served.append(given[0].shape[0])
        launch_router(tokens, given, *args, **options)

    monkeypatch.setattr(launch, "launch_router", launched)
    return served


def drawn(experts: int, generator: torch.Generator, device: str) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    return {
        "x": normal(T, D).bfloat16(),
        "embedding": (normal(experts, D) / D**0.5).bfloat16(),
        "bias": normal(experts),
        "scale": normal(C, D).exp(),
        "assignment": torch.randint(-1, C - 1, (T,), generator=generator).to(device),
    }


def wanted(case: dict[str, Any], *settings: Any, **options: Any) -> Route:
    """Return the definition's results of float64 numbers."""
    exact = {
        name: None if value is None else value.double() if value.is_floating_point() else value
        for name, value in case.items()
    }
    return route_reference(*exact.values(), *settings, **options)


def same(one: Route, other: Route) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("experts", "top_k", "selected", "scaled", "noisy"),
    [
        (40, 3, True, True, True),
        (128, 8, False, False, False),
        (64, 16, True, False, True),
        (128, 8, True, True, False),
        (65, 1, False, True, False),
        (33, 5, True, True, False),
    ],
)
def test_its_results_are_those_of_float64(
    experts: int,
    top_k: int,
    selected: bool,
    scaled: bool,
    noisy: bool,
    one_kernel: list[int],
    generator: torch.Generator,
    device: str,
) -> None:
    case: dict[str, Any] = drawn(experts, generator, device)
    if not scaled:
        case |= {"bias": None, "scale": None, "assignment": None}
    noise = torch.randn(T, experts, generator=generator).to(device) if noisy else None
    found = fused_route(*case.values(), top_k, selected, None, 0.7, noise=noise)
    exact = wanted(case, top_k, selected, None, 0.7, noise=noise)
    assert one_kernel == [experts]
    assert torch.equal(found.expert_ids, exact.expert_ids)
    assert torch.equal(found.first, exact.first)
    assert torch.equal(found.load.double(), exact.load)
    # The bf16x2 split is off by 2^-18 of each product at most; float32 sums add as much.
    torch.testing.assert_close(found.affinity.double(), exact.affinity, rtol=0, atol=2.0**-14)
    torch.testing.assert_close(found.gate.double(), exact.gate, rtol=2.0**-13, atol=0)
    torch.testing.assert_close(found.gate_sum.double(), exact.gate_sum, rtol=2.0**-13, atol=0)


def test_it_writes_the_loss_of_a_router_without_one(
    one_kernel: list[int], generator: torch.Generator, device: str
) -> None:
    check_zero_loss(drawn(40, generator, device))
    assert one_kernel == [40, 40]


def test_a_scale_of_one_changes_no_bit(
    one_kernel: list[int], generator: torch.Generator, device: str
) -> None:
    case = drawn(48, generator, device)
    case["scale"] = torch.ones_like(case["scale"])
    plain = case | {"scale": None, "assignment": None}
    assert same(fused_route(*case.values(), 4, True), fused_route(*plain.values(), 4, True))
    assert one_kernel == [48, 48]


def test_equal_affinities_go_to_the_lower_index_and_nan_comes_first(
    one_kernel: list[int], generator: torch.Generator, device: str
) -> None:
    """Expert 2 equals 39, and 17 equals 21; a token of zeros has equal affinities everywhere."""
    case: dict[str, Any] = drawn(40, generator, device)
    case |= {"bias": None, "scale": None, "assignment": None}
    case["x"][5] = 0.0
    case["embedding"][39], case["embedding"][21] = case["embedding"][2], case["embedding"][17]
    found = fused_route(*case.values(), 6, True)
    exact = wanted(case, 6, True)
    assert torch.equal(found.expert_ids, exact.expert_ids)
    assert found.expert_ids[5].tolist() == [0, 1, 2, 3, 4, 5]
    bias = torch.zeros(40, device=device)
    bias[30], bias[4] = float("nan"), float("-inf")
    found = fused_route(case["x"], case["embedding"], bias, None, None, 40 - 1, True)
    assert one_kernel == [40]  # so many choices are another kernel's
    found = fused_route(case["x"], case["embedding"], bias, None, None, 16, True)
    assert one_kernel == [40, 40]
    assert (found.first == 30).all() and not (found.expert_ids == 4).any()


def test_a_bad_token_is_seen_and_harms_no_other(
    one_kernel: list[int], generator: torch.Generator, device: str
) -> None:
    case = drawn(40, generator, device)
    clean = fused_route(*case.values(), 4, True)
    case["x"][3, 9], case["x"][77, 0] = float("nan"), float("inf")
    found = fused_route(*case.values(), 4, True)
    bad = torch.tensor([3, 77], device=device)
    assert not found.affinity[bad].isfinite().any() and not found.gate[bad].isfinite().any()
    for one, other in ((found.affinity, clean.affinity), (found.expert_ids, clean.expert_ids)):
        one[bad] = other[bad]
        assert torch.equal(one, other)
    assert set(one_kernel) == {40}  # on a GPU a tape repeats the first launch


def test_gradients_are_those_of_float64(
    one_kernel: list[int], generator: torch.Generator, device: str
) -> None:
    case = drawn(40, generator, device)
    exact = {n: v.double() if v.is_floating_point() else v for n, v in case.items()}
    mine = [case[name].requires_grad_() for name in ("x", "embedding", "bias")]
    theirs = [exact[name].requires_grad_() for name in ("x", "embedding", "bias")]
    found = fused_route(*case.values(), 4, True, None, 0.7)
    goal = route_reference(*exact.values(), 4, True, None, 0.7)
    weight = torch.randn(T, 4, generator=generator).to(device)
    grads = torch.autograd.grad((found.gate * weight).sum() + found.gate_sum.square().sum(), mine)
    wanted_grads = torch.autograd.grad(
        (goal.gate * weight).sum() + goal.gate_sum.square().sum(), theirs
    )
    for one, other in zip(grads, wanted_grads, strict=True):
        assert (one - other).abs().max() < 2.0**-7 * other.abs().max()
    assert one_kernel == [40]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": torch.zeros(8192, 96, dtype=torch.bfloat16)}, "D % 64 == 0, not 96"),
        ({"x": torch.zeros(8192, 64)}, "it takes bfloat16, not torch.float32"),
        ({"mask": torch.ones(8192, dtype=torch.bool)}, "without a mask"),
        ({"embedding": torch.zeros(32, 64, dtype=torch.bfloat16)}, "not 32 and 8"),
        ({"embedding": torch.zeros(129, 64, dtype=torch.bfloat16)}, "not 129 and 8"),
        ({"top_k": 17}, "not 64 and 17"),
        ({}, "a CUDA device"),
    ],
)
def test_other_calls_say_why_another_kernel_serves_them(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the limits as they are
    from acmoe.ops.route.hopper.choice import router_unsupported

    case = {"x": torch.zeros(8192, 64, dtype=torch.bfloat16), "mask": None, "top_k": 8}
    case |= {"embedding": torch.zeros(64, 64, dtype=torch.bfloat16)} | change
    found = router_unsupported(case["x"], case["embedding"], case["mask"], case["top_k"])
    assert found is not None and reason in found


@pytest.mark.parametrize(
    ("tokens", "fills"),
    [
        (0, False),
        (10_112, False),  # 79 tiles of 128 tokens for 132 multiprocessors
        (10_240, True),
        (16_896, True),
        (17_024, False),  # 133 tiles: a second round of one
        (30_464, True),
        (32_768, True),
        (36_864, False),
    ],
)
def test_tiles_keep_the_multiprocessors_busy(
    tokens: int, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    from acmoe.ops.route.hopper import choice

    monkeypatch.setattr(choice, "multiprocessors", lambda: 132)
    assert choice.fills_rounds(tokens) == fills
