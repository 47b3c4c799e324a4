"""Rows sorted by expert for the Hopper GEMMs, and products of each expert's rows to compare with.

N rows, E experts; I, O inner and outer dimension of a product.
"""

import functools

import torch

# Rows of each expert, and rows for none: a whole tile and a ragged one, none, half a tile, a tile
# and a ragged half.
COUNTS, NOBODY = (130, 0, 64, 200), 70


def drawn(*shape, device):
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def plan_of(counts, nobody, device, top_k=1):
    from acmoe.ops.experts.triton.tiles import Plan

    torch.manual_seed(0)
    end = torch.tensor(counts).cumsum(0)
    order = torch.randperm(int(end[-1]) + nobody)
    return Plan(order.to(device), end.to(device), top_k)


def each_expert(plan):
    begin = 0
    for expert, end in enumerate(plan.offsets.tolist()):
        yield expert, slice(begin, end)
        begin = end


def assert_near(found, right, most=4e-3):
    """bf16 keeps 8 bits: 2^-9 of a number are lost at most."""
    assert ((found.double() - right).norm() / right.norm()).item() < most


def assert_sums_of_experts(dw, p_NO, q_NI, plan, *, transposed=False):
    """dw[e] is p^T q over the rows of expert e, or its transpose; zeros for an expert without."""
    for expert, rows in each_expert(plan):
        right_OI = p_NO[rows].double().T @ q_NI[rows].double()
        if rows.start == rows.stop:
            assert not dw[expert].any()
        else:
            assert_near(dw[expert], right_OI.T if transposed else right_OI)


def noted(called, function):
    """The function, which leaves its name each time it is called."""

    @functools.wraps(function)
    def call(*arguments, **how):
        called.append(function.__name__)
        return function(*arguments, **how)

    return call
