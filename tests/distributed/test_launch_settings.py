"""A launcher that sets the environment wrongly, and a process that is lost: one clear line each."""

import socket
from pathlib import Path

import pytest
from torch.distributed import HashStore

from acmoe import cli
from acmoe.cli import main
from acmoe.config.parallel import ParallelConfig
from acmoe.distributed import start
from acmoe.distributed.failure import FailureWatch
from acmoe.errors import UserError

TWO = ParallelConfig(data=2)
GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def message(
    monkeypatch: pytest.MonkeyPatch, parallel: ParallelConfig = TWO, **environment: str | None
) -> str:
    """Return the error of a start whose environment differs from a good one."""
    for name, value in {**GOOD, "TORCHELASTIC_USE_AGENT_STORE": None, **environment}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as stop, start.joined(parallel, "cpu"):
        pass
    return str(stop.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "zero", "RANK='zero' in the environment is no number; torchrun sets it"),
        ("RANK", "2", "RANK=2 must be less than WORLD_SIZE=2"),
        ("WORLD_SIZE", "", "WORLD_SIZE='' in the environment is no number"),
        ("MASTER_ADDR", None, "MASTER_ADDR is missing in the environment"),
        ("MASTER_PORT", None, "MASTER_PORT='' in the environment is no number"),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(
    name: str, value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said in message(monkeypatch, **{name: value})


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has started, and must not be said to be absent."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = message(monkeypatch, MASTER_PORT=str(port))
    assert said.startswith(f"rank 0 cannot listen at port {port}: ")
    assert said.endswith("; give another MASTER_PORT")


@pytest.mark.parametrize(
    ("size", "fix"), [("3", "start a multiple of 2"), ("4", "give parallel.data=2")]
)
def test_a_wrong_number_of_processes_gets_an_advice_that_works(
    size: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = message(monkeypatch, ParallelConfig(pipeline=2), WORLD_SIZE=size)
    assert said.endswith(f"needs 2 processes, but the launcher started {size}; {fix}")


def test_commands_of_one_process_ignore_a_variable_without_a_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "")
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "none")])
    assert "the launcher started" not in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [cli.TO_SPEAK])])
def test_a_mistake_of_all_processes_is_left_to_the_first(
    rank: str,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An exit of another one would have torchrun end the first before it speaks."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for name, value in {**GOOD, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main(["train", "switch-nano", "parallel.data=4"])
    assert (end.value.code, waited) == (2, waits)
    assert "needs 4 processes, but the launcher started 2" in capsys.readouterr().err


@pytest.mark.parametrize("missing", list(GOOD))
def test_a_process_without_a_launcher_reports_a_mistake_at_once(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LOCAL_RANK alone says nothing: there is no first process that torchrun could end."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for name, value in {**GOOD, "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(SystemExit) as end:
        main(["train", "switch-nano", "parallel.data=2", "device=cpu"])
    assert (end.value.code, waited) == (2, [])
    said = capsys.readouterr().err
    assert said.startswith("acmoe: ") and said.count("\n") == 1
    assert missing in said if missing.startswith("MASTER") else "needs 2 processes" in said


@pytest.mark.parametrize(
    "raised",
    [
        "[pair.cc:553] Connection closed by peer [127.0.0.1]:60046. GLHF!",
        "[pair.cc:537] Read error [127.0.0.1]:23474: Connection reset by peer.",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exited",
    ],
)
def test_a_process_that_was_killed_is_not_taken_for_an_error_of_this_one(raised: str) -> None:
    watch = FailureWatch(HashStore(), rank=0, size=2)
    try:
        found = watch.explained(RuntimeError(raised))
        assert str(found).startswith("lost the connection to another rank, which was killed")
        assert str(found.__cause__) == raised
        other = ConnectionResetError("Connection reset by peer")  # of a server, not of a rank
        assert watch.explained(other) is other
    finally:
        watch.close()
