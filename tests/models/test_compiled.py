"""Compiled blocks give what uncompiled ones give."""

from collections.abc import Iterator
from threading import Thread
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters as COUNTERS  # noqa: N812, a constant of this file

from acmoe.experts.moe import MoE
from acmoe.fast.compiled import compile_blocks
from acmoe.models.recorded import recorded
from acmoe.models.registry import create_model
from slow_cases import mostly_slow

SWIN = {
    "image_size": 16,
    "patch": 2,
    "dim": 8,
    "depths": (2, 2),
    "heads": (1, 2),
    "window": 2,
    "moe_stages": (1,),
    "adaptive_stage": 1,
    "placement": (),  # one MoE layer has none before it: the plain router
    "num_experts": 4,
    "drop_path": 0.2,
}
# The compiler itself makes an instance of a torch.autograd.Function while it traces, and looks at
# the gradients of tensors that have none.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    COUNTERS.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        yield


def step(backend: str | None, **changes: Any) -> list[Tensor]:
    """Loss and gradients of an update, with the same dropout and noise in each call."""
    torch.manual_seed(0)
    model = create_model("swin-nano", router="adaptive", **{**SWIN, **changes}).train()
    if backend is not None:
        compile_blocks(model, backend=backend)
    torch.manual_seed(1)
    out = model(
        torch.randn(2, 3, model.config.image_size, model.config.image_size), torch.tensor([3, 7])
    )
    (out.loss + out.aux_loss).backward()
    return [out.loss, *(cast(Tensor, p.grad) for p in model.parameters() if p.grad is not None)]


ONE_STAGE = {"depths": (2,), "heads": (2,), "moe_stages": (0,), "adaptive_stage": 0}


# A graph for each width, with and without shift; one stage has a dense block and one with experts.
# aot_eager traces the backward, too, which takes as long again.
@mostly_slow(
    ("changes", "graphs", "backend"),
    [(ONE_STAGE, 2, "eager"), (ONE_STAGE, 2, "aot_eager"), ({}, 4, "aot_eager")],
    ids=["one stage", "one stage and its backward", "two stages and their backward"],
)
def test_compiled_blocks_give_loss_and_gradients_of_plain_ones(
    changes: dict[str, Any], graphs: int, backend: str
) -> None:
    plain, found = step(None, **changes), step(backend, **changes)
    assert COUNTERS["stats"]["unique_graphs"] == graphs
    assert not COUNTERS["graph_break"]
    assert len(found) == len(plain) > 25 * graphs // 2
    for got, wanted in zip(found, plain, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.slow
def test_more_kinds_of_blocks_than_the_compiler_expects_are_all_compiled() -> None:
    """Beyond its limit it would run the others as they are, and here raise."""
    step(
        "aot_eager",
        image_size=32,
        adaptive_stage=2,
        depths=(2, 2, 6, 2),
        heads=(1, 2, 2, 4),
        moe_stages=(2, 3),
    )
    # Two for each of the first widths; the third: dense before and after the first MoE layer, that
    # layer, which reads no scale, one between, and the last, which computes none; and two more.
    assert COUNTERS["stats"]["unique_graphs"] > 8


def test_a_compiled_layer_records_its_routings_in_every_thread_by_one_graph() -> None:
    layer = MoE(dim=4, hidden=4, num_experts=4, top_k=2).eval()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    counts: list[int] = []

    @torch.no_grad()
    def call() -> None:
        with recorded([layer]) as routings:
            compiled(torch.zeros(3, 4))
        counts.append(len(routings))

    call()
    other = Thread(target=call)
    other.start()
    other.join()
    assert counts == [1, 1]
    assert COUNTERS["stats"]["unique_graphs"] == 1


def test_routings_are_returned_with_a_graph_break_and_the_full_graph_names_it() -> None:
    model = create_model("switch-nano", router="smoe").eval()
    tokens = torch.arange(4)[None]
    wanted = model(tokens, return_routings=True).routings
    found = torch.compile(model, backend="eager")(tokens, return_routings=True).routings
    assert all(torch.equal(a.expert_ids, b.expert_ids) for a, b in zip(found, wanted, strict=True))
    torch.compiler.reset()
    with pytest.raises(Unsupported, match=r"return_routings=True .*; compile without fullgraph"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens, return_routings=True)
