"""Cells on a cluster that is played by a list: one record each, lost cells again, room, time."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from acmoe.errors import UserError
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.cluster import RETRIES, Lost, run_on_cluster
from acmoe.lab.study.ray_cluster import capacity, cell_resources, check_scratch
from acmoe.lab.study.ray_worker import Job, cell_lock, run_task
from acmoe.lab.study.results.records import open_results, read_results
from acmoe.lab.study.worker import failure
from acmoe.storage.lock import locked


@dataclass(frozen=True)
class Plain:
    steps: int = 10
    checkpoint_every: int | None = None


def cell(seed: int, **config: Any) -> Cell:
    return Cell(
        study="s", setting="t", condition="c", seed=seed, size="", data="", config=Plain(**config)
    )


@dataclass
class Played:
    """Ends the oldest running cell at every call, as its script says."""

    script: dict[int, list[str]] = field(default_factory=dict)  # by seed: lost, failed, ...
    room: int = 2
    running: list[Cell] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    most: int = 0

    def capacity(self) -> int:
        return self.room

    def start(self, cell: Cell) -> None:
        self.started.append(cell.seed)
        self.running.append(cell)
        self.most = max(self.most, len(self.running))

    def ended(self) -> list[tuple[str, Any]]:
        one = self.running.pop(0)
        todo = self.script.get(one.seed, [])
        how = todo.pop(0) if todo else "done"
        if how == "lost":
            return [(one.digest, Lost("node died"))]
        if how == "failed":
            return [(one.digest, failure(one, "no such file"))]
        done = {**one.to_json(), "digest": one.digest, "status": "done", "metrics": {"seconds": 1}}
        return [(one.digest, {**done, "environment": {"device": "of the node"}})]


def test_every_cell_has_one_record_and_lost_ones_start_again(tmp_path):
    cells = [cell(seed) for seed in range(4)]
    cluster = Played({1: ["lost", "lost"], 2: ["failed"], 3: ["lost"] * (RETRIES + 1)})
    path, events = tmp_path / "results.jsonl", []
    origin = {"environment": {"device": "of the driver"}, "options": "--steps 10"}
    with open_results(path) as results:
        tally = run_on_cluster(
            cells,
            results,
            cluster,
            origin=origin,
            on_event=lambda cell, event, text: events.append((cell.seed, event, text)),
        )
    assert (tally.done, tally.failed, tally.left) == (2, 2, 0)
    records = {record["seed"]: record for record in read_results(path)}
    assert len(read_results(path)) == len(records) == 4
    assert [records[seed]["status"] for seed in range(4)] == ["done", "done", "failed", "failed"]
    assert records[2]["error"] == "no such file"
    assert records[3]["error"] == "lost 4 times: node died"
    assert [cluster.started.count(seed) for seed in range(4)] == [1, 3, 1, 4]
    assert cluster.most == 2
    assert records[0]["environment"] == {"device": "of the node"}
    assert records[3]["environment"] == {"device": "of the driver"}
    assert {record["options"] for record in records.values()} == {"--steps 10"}
    assert (1, "progress", "starts again (2 of 3 times): node died") in events
    assert [event for event in events if event[0] == 2] == [
        (2, "begun", ""),
        (2, "failed", "no such file"),
    ]


def test_a_driver_that_died_leaves_its_records_and_the_next_runs_the_rest(tmp_path):
    class Dies(Played):
        def ended(self) -> list[tuple[str, Any]]:
            if len(self.started) == 3:
                raise KeyboardInterrupt
            return super().ended()

    cells, path = [cell(seed) for seed in range(4)], tmp_path / "results.jsonl"
    with pytest.raises(KeyboardInterrupt), open_results(path) as results:
        run_on_cluster(cells, results, Dies())
    with open_results(path) as results:
        left = [one for one in cells if results.status(one.digest) is None]
        assert [one.seed for one in left] == [1, 2, 3]
        run_on_cluster(left, results, Played())
    assert sorted(record["seed"] for record in read_results(path)) == [0, 1, 2, 3]


def test_without_time_no_cell_is_begun_and_without_nodes_one_waits_for_them(tmp_path):
    cells = [cell(0), cell(1)]
    with open_results(tmp_path / "results.jsonl") as results:
        assert run_on_cluster(cells, results, Played(), minutes=0.0).left == 2
        none = Played(room=0)
        assert run_on_cluster(cells, results, none).done == 2
    assert none.most == 1


def node(cpu: float, gpu: float = 0, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"CPU": cpu, "GPU": gpu} if gpu else {"CPU": cpu}}


@pytest.mark.parametrize(
    ("nodes", "jobs", "device", "reserved", "at_once"),
    [
        ([node(16), node(8)], 1, "auto", {"num_cpus": 8}, 3),
        ([node(16), node(8), node(64, alive=False)], 4, "auto", {"num_cpus": 2}, 12),
        ([node(2)], 3, "cpu", {"num_cpus": 1}, 2),
        ([node(4), node(64, 8)], 1, "auto", {"num_cpus": 8, "num_gpus": 1.0}, 8),
        # A sixth, rounded up to 0.1667, would fit into a GPU five times.
        ([node(60, 2)], 6, "cuda", {"num_cpus": 5, "num_gpus": 0.1666}, 12),
    ],
)
def test_jobs_cells_share_a_gpu_or_the_cores_of_a_node(nodes, jobs, device, reserved, at_once):
    assert cell_resources(nodes, jobs, device) == reserved
    assert capacity(nodes, reserved) == at_once


def test_what_a_cluster_cannot_do_is_refused(tmp_path):
    with pytest.raises(UserError, match="no node of the Ray cluster has a GPU"):
        cell_resources([node(4)], 1, "cuda")
    check_scratch([cell(0)], None)
    with pytest.raises(UserError, match="give a folder that all nodes see with --scratch"):
        check_scratch([cell(0), cell(1, checkpoint_every=2)], None)
    other = run_task(cell(0), Job(jobs=1, device="cpu", scratch=None, version="0.0"))
    assert other["status"] == "failed"
    assert "the driver 0.0; install the same" in other["error"]
    assert other["environment"]["jobs"] == 1


def test_a_folder_that_another_process_holds_is_waited_for(tmp_path):
    one = cell(0, checkpoint_every=2)
    lock = tmp_path / f".acmoe-study-{one.digest}.lock"
    held = pytest.raises(UserError, match="is held by process")
    with locked(lock, in_use=""), held, cell_lock(one, tmp_path, patience=0.1):
        pass
    with cell_lock(one, tmp_path, patience=0.1):
        assert lock.is_file()
    assert list(tmp_path.iterdir()) == []
