"""The router of few tokens, whose features are summed in ranges (route/triton/few_tokens.py).

T tokens, D features, E experts, C clusters, K experts per token, as route_cases.py has them.
"""

import pytest
import torch
from route_cases import NOISY, C, E, K, T, compare, drawn, sorted_by
from torch import Tensor

from acmoe.ops.route.tokens import ScaledTokens
from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

RANGES = [(*case[:4], most) for case in NOISY if not case[4] for most in (2, 4)]


@mostly_slow(("dtype", "scaled", "selected", "masked", "most"), RANGES, keep={0, 3, 4, 7})
def test_the_features_of_few_tokens_may_be_summed_in_ranges(
    dtype: torch.dtype,
    scaled: bool,
    selected: bool,
    masked: bool,
    most: int,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seventy features in two ranges, of 64 and 6, or in three of 32, 32 and 6."""
    from acmoe.ops.route.triton import few_tokens

    monkeypatch.setattr(few_tokens, "FEWEST_FEATURES", 16)
    monkeypatch.setattr(few_tokens, "MOST_RANGES", most)
    case = drawn(generator, device, dtype, scaled)
    assert few_tokens.range_size(case["x"], case["embedding"]) == 128 // most
    noise = torch.randn(T, E, generator=generator).to(device)
    compare(case, selected, masked, generator, None, noise)


@mostly_slow("dtype", [torch.bfloat16, torch.float32])
def test_neither_a_scale_of_one_nor_an_unread_sum_changes_a_bit_of_few_tokens(
    dtype: torch.dtype, generator: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that select are smaller where nobody reads the sums of the balance loss."""
    from acmoe.ops.route.op import fused_route as kernel
    from acmoe.ops.route.triton import few_tokens

    monkeypatch.setattr(few_tokens, "FEWEST_FEATURES", 16)
    case = drawn(generator, device, dtype, scaled=True)
    x, embedding = case["x"].detach(), case["embedding"].detach()
    one = torch.ones_like(case["scale"])

    def found(tokens: ScaledTokens, temperature: float | None) -> tuple[Tensor, ...]:
        with torch.no_grad():
            result = kernel(
                *(tokens, embedding, case["bias"]),
                top_k=K,
                over_selected=True,
                temperature=temperature,
            )
        return result.expert_ids, result.gate, result.affinity, result.first

    plain = found(ScaledTokens(x), 1.0)
    for other in (
        found(ScaledTokens(x), None),
        found(ScaledTokens(x, one, case["assignment"]), None),
        found(ScaledTokens(x, one, case["assignment"]), 1.0),
        found(ScaledTokens(x, one, case["assignment"], sorted_by(case["assignment"], C)), 1.0),
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize(
    ("tokens", "features", "experts", "size"),
    [
        (16, 2048, 64, 128),  # one block of 16 tokens and two of 32 experts: 16 ranges
        (1023, 2048, 64, 512),  # 32 blocks of 32 tokens: 4 ranges, a program a multiprocessor
        (1024, 2048, 64, 256),  # two programs a multiprocessor
        (2048, 2048, 64, 512),
        (2048, 2048, 128, 1024),  # two blocks of experts
        (2049, 2048, 64, 2048),
        (1024, 2048, 129, 2048),
        (1024, 960, 64, 960),
        (1023, 352, 16, 128),
    ],
)
def test_the_features_of_a_range(tokens: int, features: int, experts: int, size: int) -> None:
    from acmoe.ops.route.triton.few_tokens import in_ranges, range_size

    x = torch.empty(tokens, features, dtype=torch.bfloat16, device="meta")
    embedding = torch.empty(experts, features, dtype=torch.bfloat16, device="meta")
    assert range_size(x, embedding) == size
    assert in_ranges(x, embedding) == (size < features)
