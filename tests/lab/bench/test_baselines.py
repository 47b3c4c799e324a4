"""Adapters of the baselines, against stand-ins that follow each package in plain PyTorch.

T tokens, E experts, K experts per token, N = T * K rows.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from acmoe.lab.bench.implementations.plain import grouped_layer
from acmoe.lab.bench.implementations.registry import IMPLEMENTATIONS
from acmoe.lab.bench.layers.layer import LayerConfig, check_layer, draw_trial
from acmoe.lab.bench.shapes import SHAPES

CPU = torch.device("cpu")


def flatten_sort_count(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    sorted_ids, order = ids.flatten().sort()
    return sorted_ids, order, ids.flatten().bincount(minlength=num_experts).cumsum(-1)


def parallel_linear(
    x: Tensor,
    weight_EIO: Tensor,
    k: int,
    sorted_ids: Tensor,
    order: Tensor,
    end: Tensor,
    expert_biases: Tensor | None = None,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
) -> Tensor:
    rows = x if grouped_in else x[order // k]
    y = torch.einsum("ni,nio->no", rows, weight_EIO[sorted_ids])
    if expert_biases is not None:
        y = y + expert_biases[sorted_ids]
    if grouped_out:
        return y
    y = y[order.argsort()]
    return y if gates is None else (gates[..., None] * y.view(*gates.shape, -1)).sum(1)


def swiglu_experts(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
    """Gate first, then up: the layout of transformers and Liger."""
    first, second = torch.einsum("td,tkwd->tkw", x, up[ids.long()]).chunk(2, -1)
    a = nn.functional.silu(first) * second
    return torch.einsum("tk,tkf,tkdf->td", gate, a, down[ids.long()])


class StandInExperts(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        E, D, F = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, F))

    def forward(self, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
        assert self.config._experts_implementation == "grouped_mm"
        return swiglu_experts(x, self.gate_up_proj, self.down_proj, ids, gate)


def apply_experts(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
    assert ids.dtype == torch.int32
    return swiglu_experts(x, up, down, ids, gate)


def module(name: str, **names: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


STAND_INS = {
    "scattermoe": [
        module("scattermoe", flatten_sort_count=flatten_sort_count, parallel_linear=parallel_linear)
    ],
    "transformers": [
        module("transformers", Qwen3MoeConfig=SimpleNamespace),
        module("transformers.models.qwen3_moe.modeling_qwen3_moe", Qwen3MoeExperts=StandInExperts),
    ],
    "liger": [
        module("liger_kernel.ops", LigerFusedMoEFunction=SimpleNamespace(apply=apply_experts))
    ],
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("scattermoe", "tiny"), ("scattermoe", "tiny-relu")),
        *(("transformers", "tiny"), ("liger", "tiny")),
    ],
)
def test_an_adapter_gives_its_package_the_layer_we_mean(
    name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stand_in in STAND_INS[name]:
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    trial = draw_trial(SHAPES[shape], LayerConfig(dtype="fp32"), CPU)
    (baseline,) = [one for one in IMPLEMENTATIONS if one.name == name]
    check_layer(baseline.build(trial.shape, trial.weights), trial)  # raises if it is wrong


@pytest.mark.parametrize("shape", ["tiny", "tiny-relu"])
def test_the_layer_given_to_the_compiler_is_the_layer_we_mean(shape: str) -> None:
    trial = draw_trial(SHAPES[shape], LayerConfig(dtype="bf16"), CPU)
    check_layer(lambda x: grouped_layer(x, trial.weights, trial.shape), trial)
