"""Sort routed rows by expert in C, by counting.

N routed rows, E experts.
"""

import torch
from torch import Tensor

from acmoe.ops.empty import shared_empty
from acmoe.ops.native.library import SERVED, functions
from acmoe.ops.sort.reference import Rows


def sorted_rows(expert_ids: Tensor, num_experts: int) -> Rows | None:
    """Return the op `sort_rows` of contiguous int64 ids, or None if one is not in [0, E]."""
    permutation_N, inverse_N, expert_N = expert_ids.new_empty(3, expert_ids.numel()).unbind()
    offsets_E = expert_ids.new_empty(num_experts)
    code = functions().sort_rows(
        *(expert_ids.data_ptr(), expert_ids.numel(), num_experts, permutation_N.data_ptr()),
        *(inverse_N.data_ptr(), offsets_E.data_ptr(), expert_N.data_ptr()),
    )
    if code != SERVED:
        return None
    order = shared_empty((0,), torch.int32, expert_ids.device)
    return Rows(permutation_N, inverse_N, offsets_E, expert_N, order)
