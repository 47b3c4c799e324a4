"""Rules by which two cells are the same, or a pair."""

from dataclasses import replace

import pytest
import torch

from acmoe.config.serialize import encode
from acmoe.config.text.language import language_router
from acmoe.evaluate.run import open_corpus
from acmoe.lab.study.cell import seeds_major, without_paths
from acmoe.lab.study.cells.pairing import pair_with_plain
from acmoe.lab.study.grids.text import CONDITIONS
from acmoe.models.registry import build_model
from acmoe.train.text import TextTrainer
from study_cases import tiny_cells, tiny_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny_text(tmp_path_factory.mktemp("study"))


def first_weights(cell):
    """As a run of the cell begins."""
    config = cell.config
    torch.manual_seed(config.seed)
    trainer = TextTrainer(config, open_corpus(config.data), torch.device("cpu"))
    pair_with_plain(trainer.model, config.model, language_router("smoe", config.model), config.seed)
    return dict(trainer.model.named_parameters()), torch.rand(3)


def test_equal_seeds_give_smoe_and_adaptive_the_same_first_weights_bit_by_bit(text):
    plain, *others = tiny_cells(text, "smoe", "adaptive-previous", "adaptive-current", seeds=(3,))
    weights, drawn = first_weights(plain)
    for cell in others:
        own, own_drawn = first_weights(cell)
        renamed = {name.replace("router.base.", "router."): value for name, value in own.items()}
        assert renamed.keys() == weights.keys()
        assert all(torch.equal(renamed[name], value) for name, value in weights.items())
        assert torch.equal(own_drawn, drawn)  # dropout goes on alike


def test_routers_that_draw_otherwise_still_leave_the_rest_of_the_model_the_same(text):
    cells = tiny_cells(text, *CONDITIONS)
    found = {cell.condition: first_weights(cell) for cell in cells}
    weights, drawn = found["smoe"]
    for own, own_drawn in found.values():
        for name, value in own.items():
            if "router" not in name:
                assert torch.equal(value, weights[name]), name
        assert torch.equal(own_drawn, drawn)
    gates = [
        {name.replace("base.", ""): value for name, value in found[condition][0].items()}
        for condition in ("control", "reference-lm")
    ]
    assert all(torch.equal(gates[1][name], value) for name, value in gates[0].items())


def test_pairing_changes_nothing_of_a_plain_model(text):
    (cell,) = tiny_cells(text, "smoe")
    torch.manual_seed(0)
    model = build_model(cell.config.model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    pair_with_plain(model, cell.config.model, cell.config.model.router, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_a_digest_knows_what_was_asked_and_not_where_it_lies(text):
    (cell,) = tiny_cells(text, "smoe")
    moved = replace(cell.config, device="auto", data=replace(cell.config.data, folder="/other"))
    assert replace(cell, config=moved).digest == cell.digest
    longer = replace(cell.config, steps=5)
    changes = ({"config": longer}, {"seed": 1}, {"data": "other"}, {"condition": "x"})
    digests = {replace(cell, **change).digest for change in changes}
    assert len(digests | {cell.digest}) == 5


def test_no_place_of_this_machine_is_written_down(text, tmp_path):
    (cell,) = tiny_cells(text, "smoe", others=(("check", str(tmp_path / "x.npy")),))
    assert str(text.folder) in str(encode(cell.config))
    assert str(text.folder.parent.parent) not in str(cell.to_json())
    assert str(tmp_path) not in str(cell.to_json())
    assert cell.to_json()["tests"]["others"] == ["check"]
    assert without_paths([{"source": "/a", "size": 2}]) == [{"size": 2}]


def test_all_conditions_of_a_seed_come_before_the_next_seed(text):
    cells = tiny_cells(text, "smoe", "control", seeds=(0, 1))
    ordered = seeds_major(cells[::-1])
    assert [cell.seed for cell in ordered] == [0, 0, 1, 1]
    assert {cell.condition for cell in ordered[:2]} == {"smoe", "control"}


def test_a_field_that_came_later_changes_a_cell_only_where_it_is_used() -> None:
    """Results from before it stay those of their cells."""
    before = {
        "augment": {"mixup": 0.0},
        "data": {"holdout": 0.1},
        "attacks": [{"attack": {}, "dropless": False}],
    }
    unused = {
        "augment": {"mixup": 0.0, "repeats": 1},
        "compile": False,
        "ema": None,
        "eval_capacity": "model",
        "data": {"holdout": 0.1, "on_device": False},
        "attacks": [{"attack": {}, "precision": "fp32", "capacity": "model"}],
    }
    assert without_paths(unused) == before
    used = {
        "augment": {"mixup": 0.0, "repeats": 3},
        "compile": True,
        "ema": 0.9,
        "eval_capacity": None,
        "data": {"holdout": 0.1, "on_device": True},
        "attacks": [{"attack": {}, "capacity": 1.25}],
    }
    assert without_paths(used) == used
    language = {"steps": 3, "compile": False}  # had it from the start
    assert without_paths(language) == language
