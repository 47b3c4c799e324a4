"""The commands that repeat the runs of a group: its setting, conditions, seeds and options."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from acmoe.lab.study.planned import UnreadMaterials
from acmoe.lab.study.results.records import Record
from acmoe.lab.study.results.summary import Group
from acmoe.lab.study.size import Size
from acmoe.lab.study.study import Study


def conditions_of(study: Study) -> dict[str, set[str]]:
    """Return the conditions that the study's grid has in each setting; reads no data."""
    found: dict[str, set[str]] = {}
    unread = UnreadMaterials(data=Path(), work=Path())
    for cell in study.cells(unread, Size(), study.own_seeds[:1]):
        found.setdefault(cell.setting, set()).add(cell.condition)
    return found


def commands_of(study: Study, group: Group, grid: Mapping[str, set[str]]) -> list[str]:
    """Return the commands that repeat the group's runs and no others of its setting.

    `grid` has the conditions of each setting. `--only` is left out where all of them have run with
    the same seeds, and in settings that the grid no longer has.
    """
    by_option: dict[str, list[Record]] = {}
    for record in group.records:
        by_option.setdefault(record.get("options", ""), []).append(record)
    commands = []
    for option in sorted(by_option):
        for conditions, seeds in _by_seeds(by_option[option]):
            some = not grid.get(group.setting, set()) <= set(conditions)
            # Other studies run whole; of a long one, nobody runs all settings to repeat one.
            long = study.declared_pairs is not None
            alone = some or long or group.setting in study.free_settings
            words = [
                *(["--data DATA"] if study.reads([group.setting]) else []),
                *([f'--settings "{group.setting}"'] if alone else []),
                *(["--only", *conditions] if some else []),
                *("--seeds", *map(str, seeds)),
            ]
            commands.append(_command(study.name, words, option.split()))
    return commands


def _by_seeds(records: Sequence[Record]) -> list[tuple[list[str], tuple[int, ...]]]:
    """Group the conditions that have the same seeds, in the order in which they first ran."""
    seeds: dict[str, set[int]] = {}
    for record in records:
        seeds.setdefault(record["condition"], set()).add(record["seed"])
    found: dict[tuple[int, ...], list[str]] = {}
    for condition, of_condition in seeds.items():
        found.setdefault(tuple(sorted(of_condition)), []).append(condition)
    return [(conditions, same) for same, conditions in found.items()]


def _command(name: str, words: Sequence[str], options: Sequence[str]) -> str:
    """Return the command of a study; KEY=VALUE comes first, since after --seeds it is a seed."""
    settings = [one for one in options if "=" in one and not one.startswith("--")]
    others = [one for one in options if one not in settings]
    return " ".join(["acmoe study", name, *settings, *words, *others])
