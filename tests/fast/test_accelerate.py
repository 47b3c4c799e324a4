"""The fast runner computes what the plain one does."""

import copy

import pytest
import torch
from accelerate_cases import TOKENS, build, outcome
from torch import Tensor, nn

import acmoe
from acmoe.fast import accelerate, explain, restore
from acmoe.fast.accelerate import PLAIN
from acmoe.fast.compiled import compile_blocks
from acmoe.fast.text import run_block


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre", "position": "rope"},
        {"empty_memory": "zeros"},
        {"layers": ("moe", "ffn"), "repeats": 2},
        {"checkpoint_blocks": True},
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_plain_runner(changes) -> None:
    checkpoint = changes.pop("checkpoint_blocks", False)
    model = build(**changes)
    model.checkpoint_blocks = checkpoint
    expected = outcome(model)
    assert explain(model) == PLAIN
    accelerate(model)
    assert explain(model) is None
    found = outcome(model)
    assert torch.equal(found[0], expected[0])
    assert_close(found, expected)
    assert restore(model) is model and torch.equal(outcome(model)[0], expected[0])


def test_a_block_that_was_compiled_by_itself_is_not_passed_over() -> None:
    model = accelerate(build())
    model.blocks[1].compile(backend="eager")
    reason = "blocks.1 is compiled; compile_blocks (acmoe.fast.compiled) compiles both"
    assert explain(model) == reason


def test_a_runner_that_was_compiled_is_kept() -> None:
    model = accelerate(build(repeats=1, placement=()))
    compile_blocks(model, backend="eager")
    compiled = model.runner.block
    assert accelerate(model).runner.block is compiled is not run_block
    assert explain(model) is None


def test_parameters_and_state_dict_stay_as_they_are() -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerate(model)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    twin = copy.deepcopy(model)
    assert explain(twin) is None and torch.equal(outcome(twin)[0], outcome(model)[0])


def test_models_are_created_and_loaded_with_the_fast_runner(tmp_path) -> None:
    model = acmoe.create_model("switch-nano")
    assert explain(model) is None
    acmoe.save(model, tmp_path / "model")
    assert explain(acmoe.load(tmp_path / "model")) is None


def test_the_environment_turns_it_off(monkeypatch) -> None:
    monkeypatch.setenv("ACMOE_FAST", "never")
    assert explain(acmoe.create_model("switch-nano")) == PLAIN
    model = accelerate(build())
    assert explain(model) == PLAIN
    monkeypatch.setenv("ACMOE_FAST", "sometimes")
    with pytest.raises(acmoe.UserError, match="ACMOE_FAST='sometimes' is unknown; choose auto or"):
        accelerate(model)


def test_images_are_the_same_on_the_fast_path_and_hooks_fire_there() -> None:
    torch.manual_seed(0)
    model = restore(acmoe.create_model("swin-nano", router="adaptive")).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = model(images).logits
    accelerate(model)
    assert "CUDA device" in explain(model)  # the reason on a CPU
    calls = []
    for block in model.blocks:
        block.attention.qkv.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(model(images).logits, expected)
    assert len(calls) == len(model.blocks)


def test_a_model_without_a_fast_path_says_so() -> None:
    assert explain(accelerate(nn.Linear(2, 2))) == "Linear has no fast path"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
def test_a_whole_model_on_the_fast_path_compiles_to_one_graph() -> None:
    model = accelerate(build(repeats=1, placement=()))
    expected = model(TOKENS, TOKENS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(TOKENS, TOKENS)
    torch.testing.assert_close(found.loss, expected.loss)
    (found.loss + found.aux_loss).backward()
    assert model.blocks[0].attention.query.weight.grad.abs().sum() > 0
