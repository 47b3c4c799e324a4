"""Every MoE router of transformers is found, and read as its model uses it."""

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families_page import page
from small_models import FAMILIES, build, inputs, is_known
from torch import Tensor, nn
from transformers.utils import logging

from acmoe.errors import UserError
from acmoe.hf import families
from acmoe.hf.discovery import FoundRouter, RouterStack, find_stacks

REFUSED = ("doge",)
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
# Their routers return no logits before, or there is no router module.
LOGITS_SINCE_5_22 = ("aria", "longcat_flash", "switch_transformers")
FAST = ("mixtral", "gpt_oss", "switch_transformers")
FOUND = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in FAMILIES
    if name not in REFUSED
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tiny configs make transformers warn about positions."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)


class Listener:
    """Keeps what the routers and stacks of a model are given and return in one forward pass."""

    def __init__(self, stacks: list[RouterStack]) -> None:
        self.calls: dict[str, list[tuple[Tensor, Any]]] = {}
        self.recorded: dict[str, Any] = {}
        self.layers: list[nn.Module] = []
        for stack in stacks:
            stack.stack.config.output_router_logits = True
            stack.stack.register_forward_pre_hook(self.before_stack, with_kwargs=True)
            stack.stack.register_forward_hook(self.after_stack(stack))
            for layer in stack.layers:
                layer.register_forward_pre_hook(self.before_layer, with_kwargs=True)
            for router in stack.routers:
                router.module.register_forward_hook(self.after_router(router))

    def before_stack(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"acmoe_mark": 5}

    def before_layer(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        assert kwargs.pop("acmoe_mark") == 5
        self.layers.append(module)
        return args, kwargs

    def after_stack(self, stack: RouterStack) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self.recorded[stack.name] = output.get("router_logits")

        return keep

    def after_router(self, router: FoundRouter) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self.calls.setdefault(router.name, []).append((args[0], output))

        return keep


@pytest.mark.parametrize("name", FOUND)
def test_routers_are_found_and_read_as_the_model_uses_them(name: str) -> None:
    if not is_known(name) or (name in LOGITS_SINCE_5_22 and VERSION < (5, 22)):
        pytest.skip(f"transformers {transformers.__version__} gives no logits of {name}")
    model = build(name)
    stacks = find_stacks(model)
    heard = Listener(stacks)
    with torch.no_grad():
        model(**inputs(name), output_router_logits=True)

    # Layers run in the listed order, each once, and get what their stack is given.
    assert heard.layers == [layer for stack in stacks for layer in stack.layers]
    routers = [router for stack in stacks for router in stack.routers]
    assert len({router.name for router in routers}) == len(routers)
    for stack in stacks:
        assert model.get_submodule(stack.name) is stack.stack
        assert len(stack.routers) >= 2  # one tells the next one
        for router in stack.routers:
            assert model.get_submodule(router.name) is router.module
            assert any(router.module is module for module in router.layer.modules())
            assert any(router.layer is layer for layer in stack.layers)
            ((x, output),) = heard.calls[router.name]
            check_reading(router, x, output)
        check_recorded(name, heard, stack)


def check_reading(router: FoundRouter, x: Tensor, output: Any) -> None:
    assert x.shape[-1] == router.dim == 32
    tokens = x.numel() // router.dim
    scores_TE, ids_TK = router.read(output)
    assert scores_TE.shape == (tokens, router.num_experts)
    assert scores_TE.std(dim=1).min() > 0  # they decide something
    if ids_TK is None:
        return
    assert ids_TK.dim() == 2 and len(ids_TK) == tokens and not ids_TK.is_floating_point()
    assert ids_TK.min() >= 0 and ids_TK.max() < router.num_experts
    assert all(len(set(row)) == len(row) for row in ids_TK.tolist())
    # The expert that gets the largest weight has the highest score among the chosen. PhiMoE
    # normalises its two weights apart from each other.
    if type(router.module).__name__ != "PhimoeTopKRouter":
        weights_TK = output[1].reshape(ids_TK.shape)
        best_T1 = scores_TE.gather(1, ids_TK.long()).argmax(1, keepdim=True)
        torch.testing.assert_close(weights_TK.gather(1, best_T1)[:, 0], weights_TK.amax(1))


def check_recorded(name: str, heard: Listener, stack: RouterStack) -> None:
    """Check that the router logits which transformers records are the scores that were read."""
    recorded = heard.recorded[stack.name]
    scores = [r.read(heard.calls[r.name][0][1])[0] for r in stack.routers if r.adaptable]
    if VERSION < (5, 22):  # older versions declare fewer recorders, or other modules
        return
    if name == "jetmoe":  # it records the attention's router, its logits again, and the router
        recorded = recorded[2::3]
    if "gemma" in name:  # it records probabilities
        recorded = [probabilities.log() for probabilities in recorded]
    assert len(recorded) == len(scores)
    for logits, scores_TE in zip(recorded, scores, strict=True):
        assert torch.equal(logits.reshape(scores_TE.shape), scores_TE)


@pytest.mark.skipif(VERSION < (5, 22), reason="older routers return no logits")
def test_a_switch_router_sends_tokens_to_the_best_score() -> None:
    model = build("switch_transformers")
    router = find_stacks(model)[0].routers[0]
    output = router.module(torch.randn(2, 5, 32))
    scores_TE, ids_TK = router.read(output)
    assert ids_TK is None
    assert output[0].reshape(10, 8).argmax(1).tolist() == scores_TE.argmax(1).tolist()


def test_a_token_that_skips_the_experts_is_a_cluster_of_its_own() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 0.0, 1.0]]])  # two experts, and skip
    weights, ids = torch.tensor([[0.0], [0.8]]), torch.tensor([[0], [0]])
    scores_TE, ids_TK = families.read_zaya((logits, weights, ids, None))
    assert scores_TE.shape == (2, 3)
    assert ids_TK is not None and ids_TK.tolist() == [[2], [0]]


@pytest.mark.slow
def test_hash_routers_only_tell_their_clusters() -> None:
    (stack,) = find_stacks(build("deepseek_v4"))
    assert [router.adaptable for router in stack.routers] == [False, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4", "diffusion_gemma", "zaya", "ernie4_5_vl_moe"])
def test_families_that_need_a_warning_have_a_note(name: str) -> None:
    assert all(router.note for stack in find_stacks(build(name)) for router in stack.routers)


def test_a_reader_can_be_copied_and_pickled() -> None:
    router = find_stacks(build("mixtral"))[0].routers[0]
    assert router.note is None
    assert copy.deepcopy(router.read) == router.read
    assert pickle.loads(pickle.dumps(router.read)) == router.read


def test_scores_of_another_width_are_refused() -> None:
    router = find_stacks(build("mixtral"))[0].routers[0]
    with pytest.raises(UserError, match=r"mlp.gate gave scores of shape \(3, 2\), not \(T, 8\)"):
        router.read((torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.long)))


def test_ids_are_told_from_scores_where_they_stand_first() -> None:
    ids, scores = torch.tensor([[1, 0]]), torch.tensor([[0.5, 2.0, 1.0]])
    read = families.TupleReader()
    for output in ((scores, None, ids), (ids, None, scores)):
        scores_TE, ids_TK = read(output)
        assert scores_TE is not None and torch.equal(scores_TE, scores)
        assert ids_TK is not None and torch.equal(ids_TK, ids)


def test_product_keys_are_refused() -> None:
    with pytest.raises(UserError, match=r"DogeCDMoE cannot be made adaptive: .* product keys"):
        find_stacks(build("doge"))


def test_a_model_without_routers_says_what_was_looked_for() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    )
    model = transformers.LlamaForCausalLM(config)
    message = (
        r"LlamaForCausalLM has no MoE router: none of LlamaForCausalLM, LlamaModel .*"
        r"_can_record_outputs\['router_logits'\].*acmoe\.hf\.register_family"
    )
    with pytest.raises(UserError, match=message):
        find_stacks(model)


def test_a_declared_block_is_not_taken_for_a_router() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Linear(4, 4)

    model = build("mixtral")
    stack = find_stacks(model)[0].stack
    stack._can_record_outputs = {"router_logits": Block}
    for layer in stack.layers:
        layer.mlp = Block()
    with pytest.raises(UserError, match=r"layers\.0\.mlp .* is a whole MoE block \(Block\)"):
        find_stacks(model)


def test_sizes_do_not_come_from_a_packed_weight() -> None:
    model = build("dbrx")
    for router in find_stacks(model)[0].routers:  # as bitsandbytes packs 8 x 32 values of 4 bits
        packed = torch.zeros((128, 1), dtype=torch.uint8)
        router.module.layer.weight = nn.Parameter(packed, requires_grad=False)
    sizes = [(router.num_experts, router.dim) for router in find_stacks(model)[0].routers]
    assert sizes == [(8, 32)] * 4


def declared() -> set[str]:
    """Folders of the installed transformers whose models say that they record router logits."""
    folder = Path(transformers.__file__).parent / "models"
    entry = re.compile(r'^ +"router_logits": *(\[|OutputRecorder|[A-Z])', re.MULTILINE)
    files = folder.glob("*/modeling_*.py")
    return {file.parent.name for file in files if entry.search(file.read_text())}


@pytest.mark.slow
def test_nearly_all_families_of_transformers_are_covered() -> None:
    covered = {name.split(".")[0] for name in FAMILIES} - set(REFUSED)
    families_there = declared()
    missing = sorted(families_there - covered)
    print(f"{len(families_there)} families, {len(missing)} without a test: {', '.join(missing)}")
    if VERSION < (5, 22):
        pytest.skip("older versions have fewer families")
    assert len(families_there & covered) >= 60, missing


@pytest.mark.slow
def test_the_page_of_families_is_up_to_date() -> None:
    text = (Path(__file__).parents[2] / "docs" / "huggingface-families.md").read_text()
    if f"## transformers {transformers.__version__}:" not in text:
        pytest.skip(f"the page was written for another version than {transformers.__version__}")
    assert text == page()
