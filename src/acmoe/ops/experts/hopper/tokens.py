"""The weight gradients of weights.py with one gathered operand: dw[e] (D, R) = t[token]^T r.

t (T, D) holds tokens, gathered for the sorted rows of expert e, and r (N, R) sorted rows;
TRANSPOSED computes r^T t[token] (R, D). Persistent and cooperative as in weights.py, with two
producers: two warps gather the tokens of a block by cp.async, 16 bytes a copy, which arrives at the
stage's mbarrier without anybody waiting for it before the consumers do; one warp loads r by TMA.
Tokens are the narrow side of a (128, 256) tile, because gathered data passes through the load units
and TMA's does not.

Against Triton's kernel: 344 against 441 us and 634 against 841 (H200, fine, down and up weight);
with 40% of the rows at one expert 1256 against 1344 and 1443 against 1363.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from acmoe.ops.device.gluon_blocks import HALF_M, make_barriers, make_buffers
from acmoe.ops.device.gluon_names import load_rows, load_tile
from acmoe.ops.experts.hopper.ragged import load_expert_rows
from acmoe.ops.experts.hopper.weights import cooperative_consumer, tile_at

# Two warps, beside one for TMA: with more than four producer warps too few registers would be left
# for the consumers.
_GATHER_WARPS = gl.constexpr(2)


@gluon.jit
def _load_rows(r_desc, r_last_desc, pipeline, sizes, GROUP_M: gl.constexpr):
    """Producer of r: load blocks of rows by TMA, an expert's last one filled up with zeros."""
    r_bufs, full, empty = pipeline[1], pipeline[2], pipeline[3]
    num_tiles = sizes[1]
    STAGES: gl.constexpr = r_bufs.shape[0]
    BK: gl.constexpr = r_bufs.shape[1]
    k_block = 0
    for tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, begin, end, _, first_r = tile_at(tile_id, sizes, GROUP_M)
        for row in range(begin, end, BK):
            stage = k_block % STAGES
            full_bar = full.index(stage)
            is_full = row + BK <= end
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            mbarrier.expect(full_bar, r_desc.block_type.nbytes)
            buf = r_bufs.index(stage)
            load_tile(r_desc, [row, first_r], full_bar, buf, pred=is_full)
            load_expert_rows(r_last_desc, row, end, first_r, full_bar, buf, pred=row + BK > end)
            k_block += 1


@gluon.jit
def _gather_tokens(load_args, GROUP_M: gl.constexpr):
    """Producer of t: gather tokens by cp.async; their indices are loaded one block ahead."""
    t_ptr, token_ptr, pipeline, sizes = load_args
    t_bufs, full, empty = pipeline[0], pipeline[2], pipeline[3]
    num_tiles, D = sizes[1], sizes[2]
    STAGES: gl.constexpr = full.shape[0]
    BK: gl.constexpr = t_bufs.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_GATHER_WARPS, 1], [1, 0])
    step = gl.arange(0, BK, gl.SliceLayout(1, layout))
    cols = gl.arange(0, HALF_M, gl.SliceLayout(0, layout))
    k_block = 0
    for tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, begin, end, first_d, _ = tile_at(tile_id, sizes, GROUP_M)
        token = gl.load(token_ptr + begin + step, mask=begin + step < end, other=0)
        for row in range(begin, end, BK):
            next_rows = row + BK + step
            next_token = gl.load(token_ptr + next_rows, mask=next_rows < end, other=0)
            ptrs = t_ptr + first_d + token.to(gl.int64)[:, None] * D + cols[None, :]
            row_mask = (row + step < end)[:, None]
            stage = k_block % STAGES
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            for half in gl.static_range(2):
                buf = t_bufs.index(2 * stage + half)
                load_rows(buf, ptrs + half * HALF_M, mask=row_mask)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            token = next_token
            k_block += 1


@gluon.jit(do_not_specialize=["num_tiles"])
def gathered_weight_gradient_kernel(
    t_ptr,
    token_ptr,
    r_desc,
    r_last_desc,
    dw_desc,
    offsets_ptr,
    num_tiles,
    D,
    R,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """Compute dw (E * D, R), t^T r over each expert's rows; TRANSPOSED: (E * R, D), r^T t."""
    t_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF_M], r_desc.dtype)
    t_bufs = gl.allocate_shared_memory(
        r_desc.dtype, [2 * STAGES, r_desc.block_shape[0], HALF_M], t_layout
    )
    r_bufs = make_buffers(STAGES, r_desc)
    dw_bufs = make_buffers(2, dw_desc)
    full, empty = make_barriers(STAGES, 1 + 32 * _GATHER_WARPS, 2)
    pipeline = (t_bufs, r_bufs, full, empty)
    sizes = (offsets_ptr, num_tiles, D, R)
    consumer_args = (dw_desc, dw_bufs, pipeline, sizes)
    load_args = (t_ptr, token_ptr, pipeline, sizes)
    gl.warp_specialize(
        [
            (cooperative_consumer, (0, consumer_args, GROUP_M, True, TRANSPOSED)),
            (cooperative_consumer, (1, consumer_args, GROUP_M, True, TRANSPOSED)),
            (_gather_tokens, (load_args, GROUP_M)),
            (_load_rows, (r_desc, r_last_desc, pipeline, sizes, GROUP_M)),
        ],
        [4, _GATHER_WARPS, 1],
        [208, 88, 88],
    )
