"""Gradients of keys and values from kept weights: the kernel for Hopper, emulated on a CPU.

Shapes: B streams, H heads, X = B * H, L queries, S keys before them, N = S + L, W span, P features
of a head, J = ceil(N / 64) tiles of keys.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor

from acmoe.ops.attention.support import stored_width
from slow_cases import mostly_slow

if TYPE_CHECKING:  # a test imports kernels itself, to be interpreted
    from acmoe.ops.attention.hopper.saved_weights import SavedWeights
    from acmoe.ops.attention.triton.skew import SkewLayout


class Case(NamedTuple):
    """The forward's saved tensors, and the expected gradients in float64."""

    skew: "SkewLayout"
    q: Tensor
    v: Tensor
    grad: Tensor
    kept: "SavedWeights"
    lse: Tensor
    delta: Tensor
    place: Tensor  # (X, L, N): of entry (x, i, j)
    window: Tensor  # (L, N)
    zeros: Tensor  # flat: where the gradient of the scores is written, and NaN elsewhere
    dscore: Tensor  # (X, L, N)
    dk: Tensor
    dv: Tensor


def running_base(score_XLN: Tensor, visited: Tensor) -> tuple[Tensor, Tensor]:
    """(X, J, L) bases of the tiles that the forward visits, NaN for others; and (X, L, N) what each
    entry's weight is relative to."""
    X, L, N = score_XLN.shape
    base_XJL = torch.full((X, visited.shape[1], L), math.nan)
    peak_XL = torch.full((X, L), -math.inf, dtype=torch.float64)
    own_XLN = torch.zeros_like(score_XLN)
    for tile in range(visited.shape[1]):
        keys = slice(64 * tile, min(64 * tile + 64, N))
        new_XL = torch.maximum(peak_XL, score_XLN[:, :, keys].amax(2))
        seen_L = visited[:, tile].repeat_interleave(128)[:L]
        peak_XL = torch.where(seen_L, new_XL, peak_XL)
        base_XL = torch.where(peak_XL > -math.inf, peak_XL, 0.0).float()
        base_XJL[:, tile] = torch.where(seen_L, base_XL, math.nan)
        own_XLN[:, :, keys] = base_XL.double()[:, :, None]
    return base_XJL, own_XLN


def places(skew: "SkewLayout", num: int) -> Tensor:
    """(X, L, 64 J) where entries lie: see triton/skew.py, with rows `pitch` apart."""
    from acmoe.ops.attention.triton.skew import MARGIN

    x = torch.arange(num)[:, None, None]
    i = torch.arange(skew.queries)[None, :, None]
    j = torch.arange(-(-skew.keys // 64) * 64)
    row = (i % 8) * num * skew.rows + x * skew.rows + i // 8
    return MARGIN + row * skew.pitch + (skew.key0_block - i // 8) * 8 + j


def buffer(skew: "SkewLayout", num: int, met: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """NaN, but zeros in all tiles of `size` queries and 64 keys that are met."""
    flat = torch.full((skew.numel(num),), math.nan, dtype=dtype)
    met_LN = met.repeat_interleave(size, 0)[: skew.queries].repeat_interleave(64, 1)
    flat[places(skew, num)[:, met_LN]] = 0
    return flat


def make(
    S: int, L: int, W: int, P: int, features: int, *, heads: int = 3, masked: bool = True,
    dropout: float = 0.2, level: float = 0.0, dtype: torch.dtype = torch.bfloat16,
) -> Case:  # fmt: skip
    """A case in which scores lie around `level`."""
    from acmoe.ops.attention.hopper.saved_weights import SavedWeights
    from acmoe.ops.attention.triton.skew import ROW_GAP, SkewLayout

    generator = torch.Generator().manual_seed(S + L + W + P)
    skew, N = SkewLayout(heads, L, S + L, W, ROW_GAP), S + L
    q, grad, v = (torch.randn(1, heads, n, P, generator=generator) for n in (L, L, N))
    q, grad, v = (torch.where(torch.arange(P) < features, t, 0).to(dtype) for t in (q, grad, v))
    i, j = torch.arange(L)[:, None], torch.arange(N)
    distance = S + i - j
    window_LN = (distance >= 1) & (distance <= W)
    if masked:
        # No key of the first third is seen, so that the forward meets tiles before it sees a key.
        seen_N = (torch.rand(N, generator=generator) < 0.7) & (j >= N // 3)
        window_LN = window_LN & seen_N
    score_XLN = torch.randn(heads, L, N, generator=generator).double() * 4 + level
    score_XLN = torch.where(window_LN, score_XLN, -math.inf)
    reach = torch.zeros(-(-L // 128) * 128, -(-N // 64) * 64, dtype=torch.bool)
    reach[:L, :N] = (distance >= 1) & (distance <= W)
    met = reach.view(-1, 64, reach.shape[1] // 64, 64).any(3).any(1)
    visited = met.view(-1, 2, met.shape[1]).any(1)  # by the forward
    base_XJL, own_XLN = running_base(score_XLN, visited)
    total_XL = torch.exp2(score_XLN - level).sum(2)
    lse_XL = torch.where(total_XL > 0, total_XL.clamp_min(1e-300).log2() + level, 0.0).float()
    weight_XLN = torch.exp2(score_XLN - own_XLN).to(dtype)
    dropped = torch.rand(heads, L, N, generator=generator) < dropout
    weight_XLN = torch.where(dropped, -weight_XLN, weight_XLN)
    kept = buffer(skew, heads, visited, 128, dtype)
    place_XLN = places(skew, heads)[:, :, :N]
    kept[place_XLN[:, window_LN]] = weight_XLN[:, window_LN]
    delta_XL = torch.randn(heads, L, generator=generator)
    share_XL1 = torch.exp2(own_XLN - lse_XL.double()[:, :, None])
    t_XLN = torch.where(window_LN, weight_XLN.double() * share_XL1, 0.0)
    left_XLN = t_XLN.clamp_min(0)
    dweight_XLN = grad[0].double() @ v[0].double().mT
    dscore_XLN = left_XLN * dweight_XLN - t_XLN.abs() * delta_XL.double()[:, :, None]
    return Case(
        *(skew, q, v, grad, SavedWeights(kept, base_XJL[None]), lse_XL[None], delta_XL[None]),
        *(place_XLN, window_LN, buffer(skew, heads, met, 64, dtype), dscore_XLN),
        (dscore_XLN.mT @ q[0].double())[None],
        (left_XLN.mT @ grad[0].double())[None],
    )


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected).norm() <= tolerance * expected.norm())


@pytest.fixture(params=[0, 1])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel's module, whose launches the emulator runs, under two schedules of the warps."""
    if torch.cuda.is_available():
        pytest.skip("the card itself is there")
    from acmoe.ops.attention.hopper import keys as attention_keys
    from gluon_emulator import emulate

    kernel = emulate(attention_keys.keys_kernel, seed=request.param)
    monkeypatch.setattr(attention_keys, "keys_kernel", kernel)
    return attention_keys


def run(module: Any, case: Case, features: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """dk and dv, a fifth and a third of the sums, and the gradient of the scores."""
    # Keys and values side by side, as one projection makes them.
    v = case.v[..., : stored_width(features)]
    wide = torch.cat([torch.full_like(v, math.nan), v], dim=3).to(device)
    v = wide.chunk(2, dim=3)[1]
    dk, dv = torch.full_like(wide, math.nan).chunk(2, dim=3)
    kept = type(case.kept)(*(t.to(device, copy=True) for t in case.kept))
    dscores = torch.full_like(kept.weights, math.nan)
    q, grad, lse, delta = (t.to(device) for t in (case.q, case.grad, case.lse, case.delta))
    # As the output lies, which a projection reads: a position's heads side by side.
    grad = grad[..., : stored_width(features)].transpose(1, 2).contiguous().transpose(1, 2)
    upstream = module.Upstream(grad, lse, delta)
    results = module.KeyGradients(dscores, dk, dv, dk_scale=1 / 5, dv_scale=1 / 3)
    module.run_keys(q, v, upstream, kept, results, case.skew, features)
    for before, after in zip(case.kept, kept, strict=True):
        assert torch.equal(before.nan_to_num(7), after.cpu().nan_to_num(7))
    return dk.cpu(), dv.cpu(), dscores.cpu()


def check(case: Case, found: tuple[Tensor, ...]) -> None:
    dk, dv, dscores = found
    # Weights and gradients of 8 bits of mantissa: 2^-9 a rounding.
    stored = dk.shape[-1]
    assert close(dk, case.dk[..., :stored] / 5, 0.01) and close(dv, case.dv[..., :stored] / 3, 0.01)
    place = case.place[:, case.window]
    assert close(dscores[place], case.dscore[:, case.window], 0.005)
    elsewhere = torch.ones(dscores.shape, dtype=torch.bool)
    elsewhere[place] = False
    assert torch.equal(dscores[elsewhere].nan_to_num(7), case.zeros[elsewhere].nan_to_num(7))


# Memory as long as a window, shorter than it, none; tiles of queries and keys that are not whole;
# a last tile of keys that nobody sees; a head's keys shared by two programs.
@mostly_slow(
    ("S", "L", "W", "P", "features", "options"),
    [
        (109, 136, 109, 64, 44, {}),
        (25, 40, 30, 64, 60, {"dropout": 0.0}),
        (0, 8, 16, 16, 9, {"masked": False}),
        (70, 200, 90, 32, 20, {"dtype": torch.float16}),
        (300, 136, 300, 64, 44, {"heads": 1, "level": -500.0}),
    ],
    keep=(1, 2),
)
def test_the_emulated_kernel_equals_the_definition(
    S: int, L: int, W: int, P: int, features: int, options: dict[str, Any], emulated: Any
) -> None:
    case = make(S, L, W, P, features, **options)
    check(case, run(emulated, case, features))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("S", "L", "W", "P", "features", "options"),
    [
        (109, 136, 109, 64, 44, {"heads": 300}),
        (100, 512, 333, 64, 64, {}),
        (70, 200, 90, 32, 20, {"dtype": torch.float16}),
        (300, 136, 300, 16, 9, {"heads": 1, "level": -500.0}),
    ],
)
def test_on_the_card_it_equals_the_definition_twice(
    S: int, L: int, W: int, P: int, features: int, options: dict[str, Any]
) -> None:
    from acmoe.ops.device import hopper

    reason = hopper.gluon_unsupported(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    from acmoe.ops.attention.hopper import keys as attention_keys

    case = make(S, L, W, P, features, **options)
    first, second = (run(attention_keys, case, features, "cuda") for _ in range(2))
    check(case, first)
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(first, second, strict=True)
    )


def test_there_is_room_for_the_queries_of_a_head_beside_the_pipelines() -> None:
    from acmoe.ops.attention.hopper.keys import pipeline_stages

    # 227 KB: 8 tiles of 64 queries with 48 features, q and grad, are 100 KB; of 64 features 132.
    assert pipeline_stages(64, 44, 512) == 5 and pipeline_stages(64, 64, 512) == 3
    assert pipeline_stages(64, 64, 1024) < 2
