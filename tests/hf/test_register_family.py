"""A router that discovery does not know is found after `register_family` has described it."""

from collections.abc import Iterator

import pytest
import torch
from small_models import build
from torch import Tensor, nn

from acmoe.errors import UserError
from acmoe.hf import families, register_family
from acmoe.hf.discovery import find_stacks


@pytest.fixture(autouse=True)
def same_table() -> Iterator[None]:
    """Leave the table of families as it was."""
    before = dict(families.FAMILIES)
    yield
    families.FAMILIES.clear()
    families.FAMILIES.update(before)


class Chooser(nn.Module):
    """A router that nobody has declared; it returns (ids, logits)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.table(x)
        return logits.topk(2).indices, logits


class Unknown(nn.Module):
    """Two layers that stand beside each other in no ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(Chooser()) for _ in range(2))


def test_a_registered_family_is_found() -> None:
    register_family(Chooser, scores=1, ids=0, layer="Sequential", note="is only a test")
    model = Unknown()
    (stack,) = find_stacks(model)
    assert (stack.name, stack.stack, stack.layers) == ("", model, (model.first, model.second))
    assert [router.name for router in stack.routers] == ["first.0", "second.0"]
    router = stack.routers[1]
    assert (router.num_experts, router.dim, router.note) == (3, 4, "is only a test")
    ids, logits = model.second[0](torch.randn(5, 4))
    scores_TE, ids_TK = router.read((ids, logits))
    assert torch.equal(scores_TE, logits)
    assert ids_TK is not None and torch.equal(ids_TK, ids)


def test_a_layer_that_cannot_be_told_is_asked_for() -> None:
    register_family("Chooser", scores=1, ids=0)
    with pytest.raises(UserError, match=r"first\.0 stands in no nn\.ModuleList .* layer="):
        find_stacks(Unknown())
    register_family("Chooser", scores=1, ids=0, layer="Linear")
    with pytest.raises(UserError, match=r"first\.0 is not inside a Linear"):
        find_stacks(Unknown())


def test_a_router_without_sizes_is_asked_for_them() -> None:
    register_family("Identity", layer="Sequential")
    model = nn.Sequential(nn.Sequential(nn.Identity()))
    with pytest.raises(UserError, match=r"\(Identity\) shows neither num_experts"):
        find_stacks(model)
    register_family("Identity", layer="Sequential", num_experts=5, dim=3)
    router = find_stacks(model)[0].routers[0]
    assert (router.num_experts, router.dim) == (5, 3)


def test_a_plain_linear_can_be_named_by_its_place() -> None:
    register_family("Linear", ends_with=".router")
    layers = [nn.ModuleDict({"router": nn.Linear(4, 3), "up": nn.Linear(4, 6)}) for _ in range(2)]
    (stack,) = find_stacks(nn.ModuleDict({"layers": nn.ModuleList(layers)}))
    assert [router.name for router in stack.routers] == ["layers.0.router", "layers.1.router"]
    assert stack.layers == tuple(layers)
    scores_TE, ids_TK = stack.routers[0].read(layers[0]["router"](torch.ones(2, 4)))
    assert scores_TE.shape == (2, 3) and ids_TK is None


def test_a_family_that_is_named_by_its_place_hides_no_router_that_holds_its_class() -> None:
    """The router of Gemma 4 holds an nn.Linear, which stands elsewhere."""
    model = build("gemma4")
    found = find_stacks(model)
    register_family("Linear", ends_with="mlp.router")
    assert find_stacks(model) == found


class Gate(nn.Linear):
    """A router that its class makes an nn.Linear."""


def test_a_family_of_a_base_class_does_not_concern_other_places() -> None:
    register_family("Linear", ends_with="mlp.router")
    assert families.family_of(Gate(4, 3), "layers.0.gate") is None
    row = families.FAMILIES["Linear"]
    assert families.family_of(Gate(4, 3), "layers.0.mlp.router") is row


def test_a_module_that_is_named_like_a_router_is_proposed() -> None:
    layers = [nn.ModuleDict({"router": nn.Linear(4, 3), "up": nn.Linear(4, 6)}) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    call = r"acmoe\.hf\.register_family\('Linear', ends_with='router'\)"
    with pytest.raises(UserError, match=rf"if layers\.0\.router is its router, call {call}"):
        find_stacks(model)


def test_the_name_of_a_class_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"router='my\.Router' is not the name of a class"):
        register_family("my.Router")
