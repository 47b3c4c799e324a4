"""A flipped bit or a cut in any file is told with the file's name, or changes nothing."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from faults.mutations import Case, Found, make_case, mutate, use_all

STOPPED_AT = 4  # step of the last checkpoint of the stopped run
LOSSY = ("report", "metrics", "resume")  # uses that go on without damaged records, and say so


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("mutations"))


def judge(use: str, found: Found, expected: Any, file: Path) -> str:
    """Return how a use ended: refused, told, or unaffected; raise where damage went unnoticed."""
    lines = "\n".join(found.said)
    named = str(file) in lines if use != "report" else file.name in lines
    assert all("\n" not in line for line in found.said), lines
    if found.said:
        assert named, f"{file} is not named in: {lines}"
    if found.value is None:
        return "refused"
    if found.value != expected:
        if (
            use in ("report", "metrics")
            and not found.said
            and is_earlier_stop(found, expected, file)
        ):
            return "earlier stop"
        assert named and use in LOSSY and file.name == "metrics.jsonl", "a silent difference"
        if use == "resume":
            assert found.value[0] == expected[0], "other weights"
        kept, whole = (v[1] if use == "resume" else v for v in (found.value, expected))
        assert all(record in whole for record in kept), "a changed record"
    return "told" if found.said else "unaffected"


def is_earlier_stop(found: Found, expected: Any, file: Path) -> bool:
    """Return True where only records after the last checkpoint of the stopped run are gone.

    Cut off there between two lines, the file is what a kill at that moment leaves: no reader can
    tell the two apart. Resuming trains these steps again, and must end as if undisturbed.
    """
    lost = [record for record in expected if record not in found.value]
    kept = [record for record in expected if record in found.value]
    after = all(record["step"] > STOPPED_AT for record in lost)
    return file == Path("stopped/metrics.jsonl") and found.value == kept and after


def check_mutation(case: Case, number: int, *, read_only: bool = False) -> tuple[str, str]:
    """Damage a file, use the folders, restore them; return the kind of file and what was seen."""
    files = case.files()
    run, file = files[number % len(files)]
    done = mutate(case.home / file, random.Random(number))
    uses = use_all(case.home, run, case.config, read_only=read_only)
    try:
        ends = {name: judge(name, uses[name], case.expected[run][name], file) for name in uses}
    except AssertionError as error:
        raise AssertionError(f"mutation {number}, {file}: {done}: {error}") from error
    finally:
        case.restore()
    seen = "without effect"
    if {"refused", "told"} & set(ends.values()):
        seen = "detected"
    elif "earlier stop" in ends.values():
        assert read_only or ends["resume"] == "unaffected"
        seen = "as after an earlier stop"
    return kind_of(run, file), seen


def kind_of(run: str, file: Path) -> str:
    """Name the kind of a file, such as `last checkpoint, weights`."""
    name = "weights.safetensors" if file.name.startswith("weights-") else file.name
    if "checkpoints" in file.parts:
        last = "step-00000006" if run == "finished" else f"step-{STOPPED_AT:08d}"
        return f"{'last' if last in file.parts else 'earlier'} checkpoint, {name}"
    return f"{'corpus' if file.parts[0] == 'corpus' else 'run'}, {name}"


def test_a_sample_of_damaged_files_is_noticed(case: Case) -> None:
    numbers = range(0, len(case.files()), 4)
    seen = Counter(check_mutation(case, n, read_only=n % 12 != 0)[1] for n in numbers)
    # 10 files, or 11: TensorBoard writes one more into each run where it is installed.
    assert len(numbers) in (10, 11) and seen["detected"] > 5


@pytest.mark.faults
@pytest.mark.parametrize("part", range(4))
def test_every_damaged_file_is_noticed(case: Case, part: int) -> None:
    tally = Counter(check_mutation(case, number) for number in range(500 * part, 500 * (part + 1)))
    assert sum(tally.values()) == 500
    for (kind, seen), count in sorted(tally.items()):
        print(f"{kind}: {count} {seen}")
    harmless = {kind for kind, seen in tally if seen == "without effect"}
    # No use reads the process id in `lock`, or the training state of an earlier checkpoint. In the
    # other files, white space of JSON is all that may change.
    unread = {f"earlier checkpoint, {name}" for name in ("state.json", "training.safetensors")}
    # Only TensorBoard reads its events, which a run writes where it is installed.
    events = {kind for kind in harmless if kind.startswith("run, events.out.tfevents.")}
    read = harmless - unread - events - {"run, lock"}
    assert not [kind for kind in read if not kind.endswith(".json")]
