"""A layer of experts, by the definition (experts/mlp.py) and by the kernels, with its gradients."""

import torch

from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.experts import ExpertWeights, expert_mlp
from acmoe.ops.experts.autograd import fused_expert_mlp
from acmoe.ops.sort import Rows, sort_rows

KERNELS = ("up", "down", "hidden", "down_weight", "up_weight", "input")
# activation, bias, (tokens, features, hidden units, experts, experts per token)
CASES = [
    ("relu", True, (37, 40, 24, 5, 2)),
    ("gelu", True, (20, 33, 40, 3, 1)),
    ("swiglu", False, (37, 48, 40, 4, 3)),
    ("swiglu", True, (19, 64, 70, 4, 2)),
    ("relu", False, (5, 16, 16, 1, 1)),
    ("swiglu", False, (3, 40, 33, 9, 2)),  # more experts than tokens, widths of no even bytes
]


class Layer:
    """Experts, tokens, gate and a routing that leaves expert 1 empty and two tokens unserved."""

    def __init__(self, activation, bias, sizes, device, *, one_expert=False):
        tokens, dim, hidden, experts, top_k = sizes
        torch.manual_seed(tokens)
        mlp = ExpertMLP(
            dim=dim, hidden=hidden, num_experts=experts, activation=activation, bias=bias
        )
        if bias:
            torch.nn.init.normal_(mlp.up_bias)
            torch.nn.init.normal_(mlp.down_bias)
        self.mlp = mlp.to(device)
        self.x = torch.randn(tokens, dim, device=device, requires_grad=True)
        self.gate = torch.rand(tokens, top_k, device=device, requires_grad=True)
        ids = torch.rand(tokens, experts).topk(top_k).indices
        if experts > 2:
            ids[ids == 1] = 2
        if one_expert:
            ids[:] = experts - 1
        ids[2:4] = experts  # no expert
        self.ids = ids.to(device)
        self.order: Rows = sort_rows.definition(self.ids, experts)
        self.cotangent = torch.randn(tokens, dim, device=device)

    @property
    def leaves(self):
        return [self.x, self.gate, *self.mlp.parameters()]

    def reference(self):
        mlp = self.mlp
        weights = ExpertWeights(mlp.up, mlp.down, mlp.up_bias, mlp.down_bias)
        return expert_mlp.definition(
            self.x, weights, self.order, self.gate, activation=mlp.activation
        )

    def fused(self, **options):
        mlp = self.mlp
        weights = ExpertWeights(mlp.up, mlp.down, mlp.up_bias, mlp.down_bias)
        return fused_expert_mlp(
            *(self.x, weights, self.order, self.gate), activation=mlp.activation, **options
        )

    def gradients(self, out):
        return torch.autograd.grad(out, self.leaves, self.cotangent)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
