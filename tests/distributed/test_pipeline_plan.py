"""The plan of a pipeline: its stages, what is sent between them, and settings that it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

import acmoe
from acmoe.config.parallel import ParallelConfig
from acmoe.distributed import pipeline
from acmoe.errors import UserError
from acmoe.models.text.stage import boundary, cut_blocks
from tiny_runs import tiny_run
from tiny_vision_runs import tiny_vision_run

TWO = "parallel.pipeline=2"
INTERLEAVED = (TWO, "parallel.schedule=interleaved")


def test_blocks_are_cut_evenly() -> None:
    assert cut_blocks(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert cut_blocks(4, 4) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]


@pytest.mark.parametrize(
    ("router", "sizes"),
    [
        # x (2, 3, 16) and the auxiliary loss; then clusters of 6 tokens, their weights, the scale
        (acmoe.SMoEConfig(), [96, 1]),
        (acmoe.AdaptiveConfig(), [96, 1, 6, 64]),
        (acmoe.AdaptiveConfig(statistics="prefix"), [96, 1, 6]),
        (acmoe.AdaptiveConfig(statistics_of="current", mean_over="chosen"), [96, 1, 6, 64]),
        (acmoe.AdaptiveConfig(mix=2, detach=False), [96, 1, 12, 12, 64]),
    ],
)
def test_a_boundary_sends_what_the_next_router_reads(router: Any, sizes: list[int]) -> None:
    model = acmoe.create_model("switch-nano", dim=16, heads=2, num_experts=4, router=router)
    cut = boundary(model, 2)
    x = torch.randn(2, 3, 16)
    state = acmoe.RoutingState.before(x, num_clusters=4)
    for block in (0, 1):
        y, state = model.blocks[block].layer(x, state)
    expected = cut.tensors(x)
    sent = cut.pack(x, state)
    assert [each.numel() for each in sent] == sizes
    assert [(e.shape, e.dtype) for e in sent] == [(e.shape, e.dtype) for e in expected]
    assert [each.requires_grad for each in expected[:2]] == [True, True]
    back, received = cut.unpack(*sent)
    _, direct = model.blocks[2].layer(y, state)
    _, after = model.blocks[2].layer(y, received)
    assert back is x
    torch.testing.assert_close(after.aux_loss, direct.aux_loss)
    torch.testing.assert_close(after.assignment, direct.assignment)
    torch.testing.assert_close(after.scale, direct.scale)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((TWO, "split=1"), "split=1 micro-batches do not fill parallel.pipeline=2"),
        ((*INTERLEAVED, "split=5", "batch=5", "model.repeats=4"), "use a multiple of 2"),
        (INTERLEAVED, "needs a block for each of 4 stages, and the model has 3"),
        ((TWO, "parallel.shard=fsdp"), "parallel.shard=fsdp shards whole models, not stages"),
        ((TWO, "parallel.data=2", "parallel.expert=2"), "parallel.expert=2 has not been tried"),
        ((TWO, "graph=true"), "graph=true replays the updates of one process"),
        ((TWO, "compile=true"), "compile=true has not been tried"),
        (("parallel.schedule=interleaved",), "orders the work of a pipeline"),
        (("parallel.schedule=other",), "parallel.schedule"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_run(Path("corpus"), *settings)


def test_images_are_refused() -> None:
    with pytest.raises(UserError, match="cuts decoders of text"):
        tiny_vision_run(TWO)


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(UserError, match=r"needs torch 2\.13 or newer, and this is 2\.12\.1"):
        pipeline.check_torch()


def test_stages_are_dealt_in_turn() -> None:
    """Stage s lies on process s mod P, so two processes and two rounds make four stages."""
    assert ParallelConfig(pipeline=2).stages == 2
    assert ParallelConfig(pipeline=2, schedule="interleaved").stages == 4
    assert ParallelConfig(pipeline=2, data=3).processes == 6
