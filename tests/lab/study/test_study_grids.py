"""The declared grids: what is compared exists, pairs differ in the router alone, sizes are kept."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from acmoe.config.routing import AdaptiveConfig
from acmoe.config.serialize import encode, flatten
from acmoe.errors import UserError
from acmoe.lab.study.grids.ablations import PLACEMENTS, ROUTERS, placements
from acmoe.lab.study.grids.nano import TEXT_SETTING
from acmoe.lab.study.grids.variants import CHOSEN
from acmoe.lab.study.materials import Images, Materials, Text
from acmoe.lab.study.registry import STUDIES, study_of
from acmoe.lab.study.size import Size, WatchedSize


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


def cells_of(name, size=None, seeds=(10, 11)):
    return STUDIES[name].cells(NOWHERE, size or Size(), seeds)


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
        assert any(condition.startswith("adaptive") for _, condition in routers)
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


def test_a_size_knows_which_of_its_options_were_read() -> None:
    size = WatchedSize(Size(steps=30, images=3, megabytes=0.5, brief=True, overrides=("lr=1e-3",)))
    changed = size.adding("block=8")
    assert changed.steps == 30 and changed.overrides == ("block=8", "lr=1e-3")
    assert size.megabytes == 0.5 and size.parts is None
    assert size.unread() == ["--images 3", "--brief"]


def test_an_update_is_the_papers_24576_tokens():
    assert {cell.config.tokens_per_step for cell in cells_of("words")} == {24_576}
    assert {cell.config.tokens_per_step for cell in cells_of("bytes")} == {24_576}


def test_brief_cells_are_neither_finetuned_nor_attacked():
    tasks = {(cell.setting, len(cell.tests.tasks)) for cell in cells_of("words")}
    finetuned, others = ("switch-small, dropout 0.1", 3), ("switch-small", "glam-small")
    assert finetuned in tasks
    assert all(count == 0 and setting.startswith(others) for setting, count in tasks - {finetuned})
    assert all(cell.tests.tasks == () for cell in cells_of("words", Size(brief=True)))
    assert all(cell.tests.attacks == () for cell in cells_of("vision", Size(brief=True)))
    (attacks,) = {cell.tests.attacks for cell in cells_of("vision", Size(images=9, spsa_images=2))}
    assert [attack.limit for attack in attacks] == [9, 9, 2] * 2
    assert [attack.space for attack in attacks] == ["pixel"] * 3 + ["normalized"] * 3


def test_a_placement_that_changes_nothing_is_left_out():
    # 3 layers: skip-2 leaves none, back-half is full. 4: back-half is skip-1.
    assert placements(3) == ["skip-1", "alternating"]
    assert placements(4) == ["skip-1", "skip-2", "alternating"]
    assert placements(8) == ["skip-1", "skip-2", "alternating", "back-half"]
    missing = {
        setting: set(PLACEMENTS)
        - {cell.condition for cell in cells_of("ablations", seeds=(0,)) if cell.setting == setting}
        for setting in ("switch-small, dropout 0.1", "switch-enwik8, pre-norm", TEXT_SETTING)
    }
    assert list(missing.values()) == [{"skip-2", "back-half"}, set(), {"back-half"}]


def test_every_ablation_of_a_card_is_one_of_a_cpu_that_reads_no_data():
    study = STUDIES["ablations"]
    nothing = Listed(data=Path(), work=Path("work"))
    free = study.cells(nothing, Size(), (0,), settings=("nano",))
    assert {cell.setting for cell in free} == set(study.free_settings) == {TEXT_SETTING}
    assert {cell.condition for cell in free} == {*ROUTERS, *placements(4)}
    for cell in free:
        assert cell.config.data.name == "stdlib"
        assert cell.config.model.placement == (
            cell.condition if cell.condition in PLACEMENTS else "full"
        )
    assert not study.reads(("nano",)) and not study.reads((TEXT_SETTING, "standard"))
    assert study.reads(()) and study.reads(("nano", "enwik8")) and STUDIES["bytes"].reads(("nano",))
    assert not STUDIES["synthetic"].reads(())
    everything = study.cells(NOWHERE, Size(), (0,), settings=("nano", "enwik8"))
    assert {cell.setting for cell in everything} == {TEXT_SETTING, "switch-enwik8, pre-norm"}


@pytest.mark.parametrize("name", ["long", "ablations", "remedies"])
def test_a_part_of_names_of_both_kinds_selects_settings_of_both(name):
    study = STUDIES[name]
    listed = [cell.setting for cell in cells_of(name, seeds=(0,))]
    free, reading = set(study.free_settings), set(study.settings) - set(study.free_settings)
    assert set(listed) == free | reading
    found = study.cells(NOWHERE, Size(), (0,), settings=("switch",))
    assert {cell.setting for cell in found} == free | reading
    assert study.reads(("switch",)) and not study.reads(("nano",))
    first = study.parts[0].settings
    found = study.cells(NOWHERE, Size(), (0,), settings=first[:1])
    assert {cell.setting for cell in found} == set(first)


@pytest.mark.parametrize("name", ["long", "words", "ablations", "remedies", "nano"])
def test_the_parts_of_a_study_name_the_settings_of_their_cells(name):
    for part in STUDIES[name].parts:
        found = [cell.setting for cell in part.grid(NOWHERE, Size(), (0,))]
        assert tuple(dict.fromkeys(found)) == part.settings


class BytesOnly(Listed):
    def words(self, parts, vocabulary):
        raise AssertionError("no selected cell reads words")


def test_only_data_and_options_of_selected_settings_are_read():
    nowhere = BytesOnly(data=Path("data"), work=Path("work"))
    found = STUDIES["ablations"].cells(nowhere, Size(), (0,), ("switch-enwik8",))
    assert {cell.config.data.name for cell in found} == {"bytes"}
    STUDIES["words"].cells(NOWHERE, Size(brief=True), (0,), ("dropout 0.1",))
    with pytest.raises(UserError, match="reads no --brief with --settings glam-small; leave it"):
        STUDIES["words"].cells(NOWHERE, Size(brief=True), (0,), ("glam-small",))
    # An override of a language model, which an image classifier does not have.
    size = Size(overrides=("model.block=16",))
    found = STUDIES["nano"].cells(NOWHERE, size, (0,), ("switch-nano",))
    assert {cell.config.model.block for cell in found} == {16}


def test_a_nano_ablation_begins_as_the_nano_study_does():
    twins = (("smoe", "smoe"), ("adaptive", "adaptive-previous"))
    ours, theirs = (
        {cell.condition: cell for cell in cells_of(name) if cell.setting == TEXT_SETTING}
        for name in ("ablations", "nano")
    )
    for one, other in twins:
        assert (ours[one].config, ours[one].tests) == (theirs[other].config, theirs[other].tests)


def test_variants_are_confirmed_on_seeds_that_chose_nothing():
    study = STUDIES["confirm"]
    assert study.own_seeds == (10, 11, 12, 13, 14)
    chosen, all_of_them = cells_of("confirm"), cells_of("remedies")
    assert {cell.condition for cell in chosen} == {"smoe", "adaptive", *CHOSEN}
    assert len(study.comparisons) == 7  # four with the plain router, three with the paper's form
    known = [(cell.setting, cell.condition, cell.config, cell.tests) for cell in all_of_them]
    for cell in chosen:
        assert (cell.setting, cell.condition, cell.config, cell.tests) in known
    with pytest.raises(UserError, match="--seeds 2: variants were chosen on seeds below 10"):
        cells_of("confirm", seeds=(2, 10))


def test_the_metrics_of_images_are_those_their_cells_measure():
    (cell, *_) = cells_of("vision")
    from acmoe.config.images.attack import eps_text
    from acmoe.lab.study.cells.images import attack_name

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
