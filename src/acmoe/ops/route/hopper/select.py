"""Selection of experts on Hopper, from affinities in the registers of a consumer warpgroup.

A consumer holds the affinities of 64 tokens with all experts as an MMA leaves them: four threads
have the experts of a token, so that they find the best one by comparing their own numbers, and
those of three neighbours. triton/route.py computes the same from affinities in memory.

T tokens, E experts, K choices of each token.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from acmoe.ops.device.gluon_blocks import HALF_M, acc_layout
from acmoe.ops.route.triton.keys import TAKEN, affinity_keys, affinity_of


@gluon.constexpr_function
def _choices_layout(choices):
    """Return the layout of (64, choices) whose rows belong to the threads of `acc_layout`."""
    return acc_layout(max(8, triton.next_power_of_2(choices)))


@gluon.jit
def _top_k(affinity, E, K: gl.constexpr):
    """Return ids and affinities (64, BK) of the K best experts, best first, and a (64, WIDTH) mask.

    Among equal affinities the expert of the lowest index comes first.
    """
    layout: gl.constexpr = _choices_layout(K)
    BK: gl.constexpr = layout.instr_shape[1]
    WIDTH: gl.constexpr = affinity.shape[1]
    e = gl.arange(0, WIDTH, gl.SliceLayout(0, acc_layout(WIDTH)))[None, :]
    k = gl.arange(0, BK, gl.SliceLayout(0, layout))[None, :]
    key = gl.where(e < E, affinity_keys(affinity), TAKEN)
    ids = gl.zeros([HALF_M, BK], gl.int32, layout)
    values = gl.zeros([HALF_M, BK], gl.float32, layout)
    for i in range(K):  # not unrolled: the code of all choices would not fit the cache
        best = gl.max(key, axis=1)
        expert = gl.min(gl.where(key == best[:, None], e, WIDTH), axis=1)
        key = gl.where(e == expert[:, None], TAKEN, key)
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        expert = gl.convert_layout(expert, rows, assert_trivial=True)
        value = gl.convert_layout(affinity_of(best), rows, assert_trivial=True)
        ids = gl.where(k == i, expert[:, None], ids)
        values = gl.where(k == i, value[:, None], values)
    return ids, gl.where(k < K, values, float("-inf")), (key == TAKEN) & (e < E)


@gluon.jit
def select_experts(affinity, row, T, E, out_args, K: gl.constexpr, SELECTED: gl.constexpr):
    """Store ids, gate and first choice of the tokens (64,) from a row on.

    Returns the mask (64, WIDTH) of the experts that they select. affinity: -inf from expert E on.
    SELECTED: the gate is a softmax over the K selected experts instead of all.
    """
    ids_ptr, gate_ptr, first_ptr = out_args
    ids, values, selected = _top_k(affinity, E, K)
    layout: gl.constexpr = _choices_layout(K)
    if SELECTED:
        highest = gl.max(values, axis=1)[:, None]
        total = gl.sum(gl.exp(values - highest), axis=1)[:, None]
    else:
        highest = gl.max(affinity, axis=1)
        total = gl.sum(gl.exp(affinity - highest[:, None]), axis=1)
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        highest = gl.convert_layout(highest, rows, assert_trivial=True)[:, None]
        total = gl.convert_layout(total, rows, assert_trivial=True)[:, None]
    gate = gl.exp(values - highest) / total
    tokens = (row + gl.arange(0, HALF_M, gl.SliceLayout(1, layout)))[:, None]
    k = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))[None, :]
    at, valid = tokens.to(gl.int64) * K + k, (tokens < T) & (k < K)
    gl.store(gate_ptr + at, gate, mask=valid)
    gl.store(ids_ptr + at, ids.to(gl.int64), mask=valid)
    gl.store(first_ptr + tokens + k, ids.to(gl.int64), mask=(tokens < T) & (k == 0))
    return selected


@gluon.jit
def store_sums(affinity, selected, exist, block, num_blocks, E, inverse_temperature, partial_ptr):
    """Store the sums over 64 tokens for the balance loss: gates (E,), and tokens that chose e (E,).

    partial: (2, num_blocks, E). The gates are a softmax over all affinities / temperature.
    """
    WIDTH: gl.constexpr = affinity.shape[1]
    e = gl.arange(0, WIDTH, gl.SliceLayout(0, acc_layout(WIDTH)))
    exponent = affinity * inverse_temperature
    weight = gl.exp(exponent - gl.max(exponent, axis=1)[:, None])
    gate = gl.where(exist[:, None], weight / gl.sum(weight, axis=1)[:, None], 0.0)
    load = (selected & exist[:, None]).to(gl.float32)
    inside = (e < E) & (block < num_blocks)
    gl.store(partial_ptr + block * E + e, gl.sum(gate, axis=0), mask=inside)
    gl.store(partial_ptr + (num_blocks + block) * E + e, gl.sum(load, axis=0), mask=inside)
