"""A compiled `MoEStack` is one graph, and has the gradients of an eager one."""

import copy

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from stacked_blocks import PAPER, Block, D, gradients, paper_layout

from acmoe import AdaptiveConfig, MoE, MoEFFN, MoEStack


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


def running_layer():
    router = AdaptiveConfig(statistics="running")
    return MoE(dim=D, hidden=8, num_experts=4, top_k=2, router=router)


def test_layers_that_torch_compile_wrapped_pass_the_state_on(fresh_compiler):
    plain = MoEStack(running_layer() for _ in range(3))
    stack = MoEStack(torch.compile(layer, backend="eager") for layer in copy.deepcopy(plain))
    planned = [layer.next_state.next_router for layer in stack.moe_layers()]
    assert planned == [layer.next_state.next_router for layer in plain]
    x = torch.randn(2, 9, D)
    torch.testing.assert_close(stack(x), plain(x))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_layers_that_torch_compile_wrapped_train_as_eager_ones(checkpoint, nested, fresh_compiler):
    """Outputs, losses, gradients and running statistics; nested: a wrapped stack in a stack."""
    plain = MoEStack(running_layer() for _ in range(3))
    layers = [torch.compile(layer, backend=with_ops_in_place) for layer in copy.deepcopy(plain)]
    if nested:
        inner = MoEStack(copy.deepcopy(list(plain))[1:])
        layers = [layers[0], torch.compile(inner, backend=with_ops_in_place)]
    stack = MoEStack(layers, checkpoint=checkpoint)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, stack)]
    for _ in range(2):
        x = torch.randn(2, 9, D)
        for one, optimizer in zip((plain, stack), optimizers, strict=True):
            y, state = one(x, token_mask=torch.ones(2, 9, dtype=torch.bool))
            (y.square().mean() + state.aux_loss).backward()
            optimizer.step()
            one.found = [y.detach(), state.aux_loss.detach(), *(p.grad for p in one.parameters())]
            optimizer.zero_grad()
        torch.testing.assert_close(stack.found, plain.found)
        torch.testing.assert_close(list(stack.parameters()), list(plain.parameters()))
        torch.testing.assert_close(list(stack.buffers()), list(plain.buffers()))
    plain.eval(), stack.eval()
    torch.testing.assert_close(stack(x)[0], plain(x)[0])
