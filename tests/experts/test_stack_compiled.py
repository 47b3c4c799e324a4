"""A compiled `MoEStack` is one graph, and has the gradients of an eager one."""

import copy

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from stacked_blocks import PAPER, Block, D, gradients, paper_layout

from acmoe import MoEFFN, MoEStack


def test_a_stack_compiles_into_one_graph(fresh_compiler):
    torch.manual_seed(0)
    stack = MoEStack(Block("smoe"), Block(PAPER))
    x = torch.randn(9, D)
    y, state = stack(x)
    found, after = torch.compile(stack, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found, y)
    torch.testing.assert_close(after.aux_loss, state.aux_loss)
    assert after.origin.shape == state.origin.shape
    assert all(ffn.context is None for ffn in stack.modules() if isinstance(ffn, MoEFFN))


class Breaking(Block):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def with_ops_in_place(graph_module, inputs):
    """Compile as `aot_eager` does, with custom ops that write in place, as in inductor's graphs.

    `aot_eager` leaves torch's wrapper around such ops, which activation checkpointing refuses.
    """
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized

    def compiled(part, _):
        decompose_auto_functionalized(part.graph)
        part.recompile()
        return make_boxed_func(part.forward)

    return aot_module_simplified(graph_module, inputs, fw_compiler=compiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "fullgraph"),
    [
        ("stack", True),
        ("blocks", True),
        ("layers", True),
        ("checkpointed blocks", True),
        ("checkpointed stack", False),
        ("breaking stack", False),
        ("breaking blocks", False),
    ],
)
def test_compiled_stacks_have_the_gradients_of_eager(way, fullgraph, fresh_compiler):
    plain = paper_layout()
    if "breaking" in way:
        plain = MoEStack(Breaking("smoe"), Breaking(PAPER), Breaking(PAPER))
    stack = copy.deepcopy(plain)
    x = torch.randn(2, 9, D)
    y, state = plain(x)
    wanted = gradients(plain, y.square().mean() + state.aux_loss)
    stack.checkpoint = way.startswith("checkpointed")
    parts = {"stack": MoEStack, "blocks": Block, "layers": MoEFFN}[way.split()[-1]]
    for module in stack.modules():
        if isinstance(module, parts):
            module.compile(fullgraph=fullgraph, backend=with_ops_in_place)
    for _ in range(2):
        y, state = stack(x)
        found = gradients(stack, y.square().mean() + state.aux_loss)
        torch.testing.assert_close(found, wanted)
