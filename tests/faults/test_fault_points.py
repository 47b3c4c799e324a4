"""A fault at any file operation loses nothing: repeated, the command ends as if undisturbed."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from started import fork_server

from faults.inject import Fault, run_with_fault
from faults.tasks import DISTURBED, task_of
from slow_cases import mostly_slow

FORKS = fork_server()


def disturbed(name: str, materials: Any, folder: Path, fault: Fault, at: int) -> tuple[str, Any]:
    """Run the task in a process of its own; return how it ended."""
    receiver, sender = FORKS.Pipe(duplex=False)
    task = task_of(name, materials, folder)
    process = FORKS.Process(target=run_with_fault, args=(sender, task, fault, at))
    process.start()
    sender.close()
    try:
        ended: tuple[str, Any] = receiver.recv()
    except EOFError:
        ended = ("killed", None)
    process.join()
    return ended


class Whole(NamedTuple):
    """A task that nothing disturbed."""

    materials: Any
    operations: int
    result: Any


def undisturbed(name: str, folder: Path) -> Whole:
    shared = folder / "shared"
    shared.mkdir()
    materials = DISTURBED[name].prepare(shared)
    ended, operations = disturbed(name, materials, folder / "whole", "count", 0)
    assert ended == "done", operations
    return Whole(materials, operations, DISTURBED[name].result(folder / "whole"))


def check_points(
    name: str, fault: Fault, tmp_path: Path, whole: Whole, sample: int | None = None
) -> None:
    """Disturb every operation of a task, or `sample` of them."""
    materials, operations, expected = whole
    stride = 1 if sample is None else max(1, operations // sample)
    for at in range(stride // 2 + 1, operations + 1, stride):
        folder = tmp_path / f"at-{at}"
        first, why = disturbed(name, materials, folder, fault, at)
        assert first != "traceback", f"operation {at}: {why}"
        if fault == "full" and first == "refused":
            assert "\n" not in why and "No space left" in why, f"operation {at}: {why}"
        second, why = disturbed(name, materials, folder, "count", 0)
        assert second == "done", f"operation {at}: {first}, then {why}"
        assert DISTURBED[name].result(folder) == expected, f"operation {at}"


@pytest.fixture(scope="module")
def whole_training(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return undisturbed("train", tmp_path_factory.mktemp("training"))


@mostly_slow("fault", ["kill", "full"])
def test_a_training_run_survives_faults(
    fault: Fault, whole_training: Whole, tmp_path: Path
) -> None:
    assert whole_training.operations > 50
    check_points("train", fault, tmp_path, whole_training, sample=1)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["kill", "full", "torn"])
@pytest.mark.parametrize("name", DISTURBED)
def test_every_file_operation_may_fail(name: str, fault: Fault, tmp_path: Path) -> None:
    whole = undisturbed(name, tmp_path)
    check_points(name, fault, tmp_path, whole)
    print(f"{name}: {whole.operations} operations, {fault} at each")
