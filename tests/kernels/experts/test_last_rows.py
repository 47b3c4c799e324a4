"""Weight gradients of experts whose last block of 64 rows is not full, emulated, against float64.

N rows, E experts; O, I the two sides of a weight.
"""

import torch
from pipeline_cases import assert_sums_of_experts, drawn, plan_of

from acmoe.ops.experts.settings.gemms import PipelineConfig
from slow_cases import mostly_slow

# Last blocks of 1 to 63 rows behind none to five full ones; none; and full blocks alone.
COUNTS, NOBODY = (1, 74, 0, 266, 286, 300, 128, 272, 63, 332), 70


def test_the_last_rows_of_weight_gradients_are_their_expert_s(device, hopper_launch):
    """Rows for no expert, which nobody writes, are NaN. An expert without rows gets zeros."""
    plan, routed = plan_of(COUNTS, NOBODY, device), sum(COUNTS)
    p_NO, q_NI = (drawn(plan.num_rows, width, device=device) for width in (128, 256))
    p_NO[routed:] = q_NI[routed:] = torch.nan
    dw_EOI = hopper_launch.launch_weights(p_NO, q_NI, plan, PipelineConfig("cooperative", 3))
    assert_sums_of_experts(dw_EOI, p_NO, q_NI, plan)


@mostly_slow("transposed", [False, True], gpu=(1,))
def test_the_last_rows_of_gathered_weight_gradients_are_their_expert_s(
    transposed, device, hopper_launch
):
    plan, routed = plan_of(COUNTS, NOBODY, device), sum(COUNTS)
    x_TD, r_NR = (drawn(plan.num_rows, width, device=device) for width in (128, 256))
    r_NR[routed:] = torch.nan
    token_N = plan.permutation
    x_TD[token_N[routed:]] = torch.nan
    settings = PipelineConfig("cooperative", 3)
    dw = hopper_launch.launch_gathered_weights(x_TD, r_NR, plan, settings, transposed=transposed)
    assert_sums_of_experts(dw, x_TD[token_N], r_NR, plan, transposed=transposed)
