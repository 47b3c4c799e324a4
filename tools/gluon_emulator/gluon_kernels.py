"""Small Gluon kernels for the emulator's tests, with known results; BUG selects a known bug."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

try:
    from triton.experimental.gluon import aggregate
except ImportError:  # older versions keep it private
    from triton.language.core import _aggregate as aggregate

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
STAGES = gl.constexpr(2)


@gluon.jit
def gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    K,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    BUG: gl.constexpr,
):
    """Compute C = A B with a two-stage TMA pipeline; BUG leaves out one synchronisation."""
    row = gl.program_id(0) * BM
    col = gl.program_id(1) * BN
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    a_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], a_desc.layout)
    b_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, BN], b_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    acc = gl.zeros((BM, BN), dtype=gl.float32, layout=acc_layout)
    for k in range(gl.cdiv(K, BK)):
        stage = k % STAGES
        phase = (k // STAGES) & 1
        bar = bars.index(stage)
        mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(a_desc, [row, k * BK], bar, a_buf.index(stage))
        tma.async_copy_global_to_shared(b_desc, [k * BK, col], bar, b_buf.index(stage))
        if BUG == "phase":
            phase = phase ^ 1
        if BUG != "wait":
            mbarrier.wait(bar, phase)
        acc = warpgroup_mma(a_buf.index(stage), b_buf.index(stage), acc, is_async=True)
        if BUG != "mma_wait":
            acc = warpgroup_mma_wait(0, deps=[acc])
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(i))
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], c_desc.layout)
    c_buf.store(acc.to(gl.bfloat16))
    if BUG != "fence":
        fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, col], c_buf)
    if BUG != "store_wait":
        tma.store_wait(0)


@gluon.jit
def _producer(a_desc, b_desc, a_buf, b_buf, full, empty, K, BK: gl.constexpr, BUG: gl.constexpr):
    """Load both operands into the pipeline: two halves of A, and B."""
    row = gl.program_id(0) * a_desc.block_type.shape[0] * 2
    for k in range(gl.cdiv(K, BK)):
        stage = k % STAGES
        phase = (k // STAGES) & 1
        if BUG != "free":
            mbarrier.wait(empty.index(stage), phase ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        for half in gl.static_range(2):
            at = row + half * a_desc.block_type.shape[0]
            target = a_buf.index(stage * 2 + half)
            tma.async_copy_global_to_shared(a_desc, [at, k * BK], bar, target)
        tma.async_copy_global_to_shared(b_desc, [k * BK, 0], bar, b_buf.index(stage))


@gluon.jit
def _consumer(
    half: gl.constexpr, c_ptr, a_buf, b_buf, full, empty, K, BK: gl.constexpr, BUG: gl.constexpr
):
    """Compute and store one half of the rows of C."""
    BM: gl.constexpr = a_buf.shape[1]
    BN: gl.constexpr = b_buf.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    acc = gl.zeros((BM, BN), dtype=gl.float32, layout=layout)
    for k in range(gl.cdiv(K, BK)):
        stage = k % STAGES
        mbarrier.wait(full.index(stage), (k // STAGES) & 1)
        acc = warpgroup_mma(a_buf.index(stage * 2 + half), b_buf.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if BUG != "arrive" or half == 0:
            mbarrier.arrive(empty.index(stage), count=1)
    rows = (gl.program_id(0) * 2 + half) * BM + gl.arange(0, BM, gl.SliceLayout(1, layout))
    cols = gl.arange(0, BN, gl.SliceLayout(0, layout))
    gl.store(c_ptr + rows[:, None] * BN + cols[None, :], acc)


@gluon.jit
def specialized_kernel(
    a_desc,
    b_desc,
    c_ptr,
    K,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    BUG: gl.constexpr,
):
    """Compute C = A B with warp specialisation: one producer, two consumers of BM rows each."""
    a_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, BM, BK], a_desc.layout)
    b_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, BN], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_consumer, (0, c_ptr, a_buf, b_buf, full, empty, K, BK, BUG)),
            (_consumer, (1, c_ptr, a_buf, b_buf, full, empty, K, BK, BUG)),
            (_producer, (a_desc, b_desc, a_buf, b_buf, full, empty, K, BK, BUG)),
        ],
        [4, 1],
        [200, 24],
    )


@gluon.jit
def padded_kernel(out_ptr, B: gl.constexpr):
    """Write B x B numbers in a padded layout; read the first B * B words of the allocation."""
    block: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    padded: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[B, 4]], [B, B], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.arange(0, B, gl.SliceLayout(1, block))
    cols = gl.arange(0, B, gl.SliceLayout(0, block))
    smem = gl.allocate_shared_memory(gl.int32, [B, B], padded)
    smem.store(rows[:, None] * B + cols[None, :])
    gl.thread_barrier()
    flat = smem._reinterpret(gl.int32, [B * B], plain).load(line)
    gl.store(out_ptr + gl.arange(0, B * B, line), flat)


@gluon.jit
def _larger(x, y):
    return gl.maximum(x, y)


@gluon.jit
def cp_async_kernel(x_ptr, out_ptr, n, stride, B: gl.constexpr, BUG: gl.constexpr):
    """Copy rows of x to shared memory by cp.async; write the maximum of each to out."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    smem = gl.allocate_shared_memory(gl.float32, [B, B], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    rows = gl.arange(0, B, gl.SliceLayout(1, layout))
    cols = gl.arange(0, B, gl.SliceLayout(0, layout))
    mask = (rows[:, None] < n) & (cols[None, :] < n)
    async_copy.async_copy_global_to_shared(
        smem, x_ptr + rows[:, None] * stride + cols[None, :], mask=mask
    )
    async_copy.commit_group()
    if BUG != "wait":
        async_copy.wait_group(0)
    best = gl.reduce(smem.load(layout), 1, _larger)
    gl.store(out_ptr + rows, best, mask=rows < n)


@gluon.jit
def integer_kernel(x_ptr, out_ptr, factor, B: gl.constexpr):
    """Write products that wrap, a logical shift, and quotients that round towards zero."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, B, layout)
    x = gl.load(x_ptr + at)
    gl.store(out_ptr + at, x * factor)
    gl.store(out_ptr + B + at, (x.to(gl.uint32, bitcast=True) >> 28).to(gl.int32))
    gl.store(out_ptr + 2 * B + at, x // 2 + x % 3)


@gluon.jit
def asm_kernel(x_ptr, B: gl.constexpr):
    """Replace x by 2^x, by inline assembly."""
    at = gl.arange(0, B, gl.BlockedLayout([1], [32], [4], [0]))
    x = gl.load(x_ptr + at)
    y = gl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)
    gl.store(x_ptr + at, y)


@gluon.jit
def mismatched_kernel(B: gl.constexpr):
    """Add two blocks of different layouts, which must raise."""
    x = gl.arange(0, B, gl.BlockedLayout([1], [32], [4], [0]))
    y = gl.arange(0, B, gl.BlockedLayout([2], [32], [4], [0]))
    x + y


@gluon.constexpr_function
def _twice(n):
    return 2 * n


@aggregate
class Pair:
    left: gl.tensor
    right: gl.tensor

    @gluon.constexpr_function
    def __init__(self, left, right):
        self.left = left
        self.right = right

    @gluon.jit
    def total(self):
        return self.left + self.right


@gluon.jit
def batch_kernel(x_ptr, out_ptr, count_ptr, n, B: gl.constexpr):
    """Compute out[p] = x[p] x[p]^T by a descriptor made in the kernel; sum p + n over programs."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, B, 16]
    )
    desc = tma.make_tensor_descriptor(x_ptr, [n, B, B], [B * B, B, 1], [1, B, B], shared)
    x_buf = gl.allocate_shared_memory(gl.bfloat16, [1, B, B], shared)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    pid = gl.program_id(0)
    mbarrier.expect(bar, _twice(B) * B)
    tma.async_copy_global_to_shared(desc, [pid, 0, 0], bar, x_buf)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    x = x_buf.reshape([B, B])
    acc = gl.zeros((B, B), dtype=gl.float32, layout=layout)
    acc = warpgroup_mma(x, x.permute((1, 0)), acc, use_acc=pid < 0)
    rows = gl.arange(0, B, gl.SliceLayout(1, layout))
    cols = gl.arange(0, B, gl.SliceLayout(0, layout))
    gl.store(out_ptr + pid * B * B + rows[:, None] * B + cols[None, :], acc)
    seen = gl.atomic_add(count_ptr, Pair(pid, n).total())
    gl.store(count_ptr + 1 + pid, gl.load(count_ptr, mask=seen >= 0, other=0))
