"""The declared grids: what is compared exists, pairs differ in the router alone, sizes are kept."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from acmoe.config.routing import AdaptiveConfig
from acmoe.config.serialize import encode, flatten
from acmoe.errors import UserError
from acmoe.study.materials import Images, Materials, Text
from acmoe.study.registry import STUDIES, study_of
from acmoe.study.size import Size


class Listed(Materials):
    """Data that are only named."""

    def bytes(self, megabytes):
        return Text("bytes", Path(f"bytes-{megabytes:g}"), 256, "b")

    def stdlib(self, megabytes):
        return Text("stdlib", Path("stdlib"), 256, "s", int(megabytes * 1e6))

    def digits(self):
        return "d"

    def words(self, parts, vocabulary):
        return Text("words", Path("words"), vocabulary, "w")

    def images(self):
        return Images(Path("imagenette"), 112, 10, "i")

    def other_bytes(self, text, tokens):
        return Path("enwik8.npy")

    def other_words(self, text):
        return Path("wikitext103.npy")

    def tasks(self, names):
        return Path("tasks")


NOWHERE = Listed(data=Path("data"), work=Path("work"))


def cells_of(name, size=None, seeds=(0, 1)):
    return STUDIES[name].grid(NOWHERE, size or Size(), seeds)


@pytest.mark.parametrize("name", STUDIES)
def test_every_comparison_has_its_conditions_and_every_cell_its_name(name):
    cells = cells_of(name)
    conditions = {cell.condition for cell in cells}
    for condition, baseline in STUDIES[name].comparisons:
        assert {condition, baseline} <= conditions
    assert len({cell.digest for cell in cells}) == len(cells)
    assert len({(cell.setting, cell.condition, cell.seed) for cell in cells}) == len(cells)
    assert {cell.study for cell in cells} == {name}
    assert all(cell.config.seed == cell.seed for cell in cells)


@pytest.mark.parametrize("name", ["bytes", "words", "vision"])
def test_the_conditions_of_a_setting_differ_in_the_router_alone(name):
    pairs = defaultdict(list)
    for cell in cells_of(name):
        settings = flatten(encode(cell.config))
        rest = {key: value for key, value in settings.items() if not key.startswith("model.router")}
        pairs[cell.setting, cell.seed].append(rest)
    assert len(pairs) >= 6
    for first, *others in pairs.values():
        assert others
        assert all(other == first for other in others)


def test_adaptive_conditions_wrap_the_gate_they_are_compared_with():
    for cells in (cells_of("bytes"), cells_of("words"), cells_of("vision")):
        routers = {(cell.setting, cell.condition): cell.config.model.router for cell in cells}
        for (setting, condition), router in routers.items():
            if isinstance(router, AdaptiveConfig) and condition.startswith("adaptive"):
                assert router.base == routers[setting, "smoe"]
            if condition == "reference-lm":
                assert router.base == routers[setting, "control"]


def test_one_size_serves_all_cells_and_is_said_in_each():
    size = Size(steps=30, batch=4, overrides=("lr=1e-3", "model.block=64"), device="cpu")
    for cell in cells_of("bytes", size):
        run = cell.config
        assert (run.steps, run.batch, run.lr, run.device) == (30, 4, 1e-3, "cpu")
        assert (run.warmup, run.eval_every) == (3, 3)
        assert cell.size == "30 steps of 256 tokens"
    assert size.text == "--steps 30 --batch 4 lr=1e-3 model.block=64"
    assert Size(brief=True, spsa_images=3).text == "--spsa-images 3 --brief"


def test_an_update_is_the_papers_24576_tokens():
    assert {cell.config.tokens_per_step for cell in cells_of("words")} == {24_576}
    assert {cell.config.tokens_per_step for cell in cells_of("bytes")} == {24_576}


def test_brief_cells_are_neither_finetuned_nor_attacked():
    assert all(len(cell.tests.tasks) == 3 for cell in cells_of("words"))
    assert all(cell.tests.tasks == () for cell in cells_of("words", Size(brief=True)))
    assert all(cell.tests.attacks == () for cell in cells_of("vision", Size(brief=True)))
    (attacks,) = {cell.tests.attacks for cell in cells_of("vision", Size(images=9, spsa_images=2))}
    assert [attack.limit for attack in attacks] == [9, 9, 2] * 2
    assert [attack.space for attack in attacks] == ["pixel"] * 3 + ["normalized"] * 3


def test_a_placement_that_leaves_no_adaptive_layer_is_left_out():
    cells = cells_of("ablations", seeds=(0,))
    words = {cell.condition for cell in cells if cell.setting.startswith("switch-small")}
    others = {cell.condition for cell in cells} - words
    assert others == {"skip-2"}  # three layers: from the fourth on there is none


def test_the_metrics_of_images_are_those_their_cells_measure():
    (cell, *_) = cells_of("vision")
    from acmoe.config.attack import eps_text
    from acmoe.study.image_cell import attack_name

    measured = {
        f"{attack_name(attack)} {eps_text(eps)}"
        for attack in cell.tests.attacks
        for eps in attack.eps
    }
    compared = {metric.key for metric in STUDIES["vision"].compared}
    assert compared == measured | {"test"}


def test_a_study_that_is_not_declared_is_refused():
    with pytest.raises(UserError, match="did you mean words"):
        study_of("word")
    with pytest.raises(UserError, match="choose one of bytes, words"):
        study_of("?")
    with pytest.raises(UserError, match="use --seeds or --device"):
        replace(Size(), overrides=("device=cpu",))
