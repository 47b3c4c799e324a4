"""The emulator computes what small kernels compute on the card, and sees missing waits.

Shape letters: M, N, K of a product; P programs, B a block.
"""

import pytest
import torch
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gluon_emulator import emulate, register_asm
from gluon_kernels import (
    LAYOUT,
    asm_kernel,
    batch_kernel,
    cp_async_kernel,
    gemm_kernel,
    integer_kernel,
    mismatched_kernel,
    padded_kernel,
    specialized_kernel,
)
from gluon_memory import addresses
from gluon_program import Deadlock


def bf16(rows: int, cols: int, generator: torch.Generator) -> torch.Tensor:
    """Small whole numbers: every product and sum below is exact."""
    return torch.randint(-3, 4, (rows, cols), generator=generator).to(torch.bfloat16)


def run_product(generator: torch.Generator, bug: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    a_MK, b_KN = bf16(72, 160, generator), bf16(160, 136, generator)
    c_MN = torch.full((72, 136), 7.0, dtype=torch.bfloat16)
    a, b = (TensorDescriptor.from_tensor(x, [64, 64], LAYOUT) for x in (a_MK, b_KN))
    c = TensorDescriptor.from_tensor(c_MN, [64, 64], LAYOUT)
    emulate(gemm_kernel)[(2, 3)](a, b, c, 160, 64, 64, 64, bug)
    return c_MN, (a_MK.float() @ b_KN.float()).to(torch.bfloat16)


def run_specialized(
    generator: torch.Generator, bug: str = "", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    a_MK, b_KN = bf16(128, 320, generator), bf16(320, 64, generator)
    c_MN = torch.zeros(128, 64)
    a, b = (TensorDescriptor.from_tensor(x, [64, 64], LAYOUT) for x in (a_MK, b_KN))
    emulate(specialized_kernel, seed)[(1,)](a, b, c_MN, 320, 64, 64, 64, bug)
    return c_MN, a_MK.float() @ b_KN.float()


def test_a_tma_and_wgmma_product_is_right_also_at_ragged_edges(generator: torch.Generator) -> None:
    c_MN, right_MN = run_product(generator)
    assert torch.equal(c_MN, right_MN)


@pytest.mark.parametrize("bug", ["wait", "phase"])
def test_a_pipeline_that_does_not_wait_for_its_barrier_overruns_it(
    bug: str, generator: torch.Generator
) -> None:
    with pytest.raises(RuntimeError, match="more arrivals"):
        run_product(generator, bug)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("mma_wait", "warpgroup_mma_wait is missing"),
        ("fence", "fence_async_shared is missing"),
        ("store_wait", "store_wait is missing"),
    ],
)
def test_a_missing_wait_or_fence_is_named(
    bug: str, message: str, generator: torch.Generator
) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_product(generator, bug)


@pytest.mark.parametrize("seed", range(4))
def test_partitions_give_the_product_under_every_schedule(
    seed: int, generator: torch.Generator
) -> None:
    c_MN, right_MN = run_specialized(generator, seed=seed)
    assert torch.equal(c_MN, right_MN)


def test_a_missing_arrive_is_a_deadlock_that_names_who_waits(generator: torch.Generator) -> None:
    with pytest.raises(Deadlock, match=r"partition 2 \(_producer\) waits for phase 0 of barrier 0"):
        run_specialized(generator, "arrive")


def test_a_producer_that_does_not_wait_for_free_buffers_spoils_the_product(
    generator: torch.Generator,
) -> None:
    def wrong(seed: int) -> bool:
        try:
            c_MN, right_MN = run_specialized(generator, "free", seed)
        except RuntimeError:
            return True
        return not torch.equal(c_MN, right_MN)

    assert any(wrong(seed) for seed in range(4))


def test_a_descriptor_made_in_the_kernel_a_transposed_operand_and_counters_work(
    generator: torch.Generator,
) -> None:
    x_PBB = bf16(3 * 64, 64, generator).view(3, 64, 64)
    out_PBB, count = torch.zeros(3, 64, 64), torch.zeros(4, dtype=torch.int32)
    emulate(batch_kernel)[(3,)](x_PBB, out_PBB, count, 3, 64)
    assert torch.equal(out_PBB, x_PBB.float() @ x_PBB.float().mT)
    # program p adds p + 3: 3, then 7, then 12
    assert count.tolist() == [12, 3, 7, 12]


def test_a_padded_layout_leaves_gaps_that_a_flat_view_shows() -> None:
    out = torch.zeros(256, dtype=torch.int32)
    emulate(padded_kernel)[(1,)](out, 16)
    # rows of 16 numbers lie 20 words apart; the 4 words between them were never written
    right = [row * 16 + col if col < 16 else -1 for row in range(13) for col in range(20)]
    assert out.tolist() == right[:256]


def test_cp_async_lands_at_its_wait_and_masked_elements_are_zero() -> None:
    x = -torch.arange(1.0, 32 * 24 + 1).reshape(24, 32)
    out = torch.zeros(24)
    emulate(cp_async_kernel)[(1,)](x, out, 24, 32, 32, "")
    assert torch.equal(out, torch.zeros(24))
    emulate(cp_async_kernel)[(1,)](x, out, 24, 32, 32, "wait")
    assert out.isnan().all()


def test_integers_wrap_and_divide_as_on_the_card() -> None:
    x = torch.tensor([-7, 7, -(2**31), 2**31 - 1] * 32, dtype=torch.int32)
    out = torch.zeros(3, 128, dtype=torch.int32)
    emulate(integer_kernel)[(1,)](x, out, 65536, 128)
    # -7 * 65536 fits; the extremes keep their lowest 16 bits, shifted up
    assert out[0, :4].tolist() == [-458752, 458752, 0, -65536]
    assert out[1, :4].tolist() == [15, 0, 8, 7]
    # towards zero: -7 // 2 = -3, -7 % 3 = -1; -2^31 % 3 = -2; (2^31 - 1) % 3 = 1
    assert out[2, :4].tolist() == [-4, 4, -(2**30) - 2, 2**30]


def test_assembly_needs_a_registered_function() -> None:
    x = torch.full((128,), 3.0)
    with pytest.raises(NotImplementedError, match="register_asm"):
        emulate(asm_kernel)[(1,)](x, 128)
    register_asm("ex2.approx.f32 $0, $1;", torch.exp2)
    emulate(asm_kernel)[(1,)](x, 128)
    assert x.tolist() == [8.0] * 128


def test_blocks_of_two_layouts_do_not_mix() -> None:
    with pytest.raises(ValueError, match="layout mismatch"):
        emulate(mismatched_kernel)[(1,)](128)


def test_every_shared_layout_gives_each_element_an_address_of_its_own() -> None:
    for layout in (LAYOUT, gl.SwizzledSharedLayout(8, 1, 8, [1, 0])):
        flat = addresses(layout, [2, 32, 128], 2).reshape(-1)
        assert torch.equal(flat.sort().values, torch.arange(2 * 32 * 128))
