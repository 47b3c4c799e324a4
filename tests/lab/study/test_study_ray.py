"""A study on two Ray nodes: the driver and a node are killed, and the records are the pool's."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from acmoe.lab.study.cluster import run_on_cluster
from acmoe.lab.study.pool import run_cells
from acmoe.lab.study.ray_cluster import ray_cluster
from acmoe.lab.study.ray_worker import Job
from acmoe.lab.study.results.records import open_results, read_results
from study_cases import tiny_cells, tiny_text

pytest.importorskip("ray", reason="needs ray: pip install 'acmoe[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of Ray

CLOCK = ("step_ms", "train_seconds", "seconds", "peak_mib")
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


@pytest.fixture
def two_nodes(monkeypatch):
    """A cluster of two nodes, with one core each, on this machine."""
    from ray.cluster_utils import Cluster

    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    yield cluster, second
    cluster.shutdown()


def drive(cells, path, scratch, address, on_event=lambda cell, event, text: None):
    """A driver, as the command is: it runs the cells that have no record."""
    job = Job(jobs=1, device="cpu", scratch=scratch)
    with open_results(path) as results:
        left = [cell for cell in cells if results.status(cell.digest) is None]
        with ray_cluster(address, job) as cluster:
            run_on_cluster(left, results, cluster, on_event=on_event)


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def with_checkpoints(scratch):
    return {path.relative_to(scratch).parts[0] for path in scratch.glob("acmoe*/**/*.safetensors")}


def test_driver_and_node_are_killed_and_the_records_are_the_pools(tmp_path, two_nodes):
    cluster, second = two_nodes
    text = tiny_text(tmp_path / "text")
    cells = [
        replace(one, config=replace(one.config, checkpoint_every=20, eval_every=100))
        for one in tiny_cells(text, "smoe", "adaptive-previous", seeds=(0, 1, 2), steps=400)
    ]
    with open_results(tmp_path / "pool.jsonl") as results:
        assert run_cells(cells, results, scratch=tmp_path).done == 6

    path, scratch = tmp_path / "ray.jsonl", tmp_path / "scratch"
    scratch.mkdir()
    logging.getLogger("ray").setLevel(logging.ERROR)
    driver = multiprocessing.get_context("spawn").Process(
        target=drive, args=(cells, path, scratch, cluster.address)
    )
    driver.start()
    wait_for(lambda: path.is_file() and path.read_bytes() and with_checkpoints(scratch))
    os.kill(driver.pid, signal.SIGKILL)
    driver.join()
    before = len(read_results(path))
    assert 1 <= before < 5

    def kill_node():
        """Kill the second node once the cells of both nodes can continue."""
        wait_for(lambda: len(with_checkpoints(scratch)) == 2)
        cluster.remove_node(second, allow_graceful=False)

    killer, events = threading.Thread(target=kill_node), []
    killer.start()
    drive(
        cells,
        path,
        scratch,
        cluster.address,
        lambda cell, event, text: events.append((event, text)),
    )
    killer.join()

    pool = {one["digest"]: one for one in read_results(tmp_path / "pool.jsonl")}
    ray = {one["digest"]: one for one in read_results(path)}
    assert len(read_results(path)) == len(ray) == 6  # every record once
    assert ray.keys() == pool.keys() == {cell.digest for cell in cells}
    for digest, one in ray.items():
        for name in CLOCK:
            assert one["metrics"].pop(name, 0) >= 0 <= pool[digest]["metrics"].pop(name, 0)
        assert (one["status"], one["metrics"]) == ("done", pool[digest]["metrics"])
        assert one["curves"]["valid"] == pool[digest]["curves"]["valid"]
    again = [text for event, text in events if event == "progress"]
    assert again
    assert all(text.startswith("starts again (1 of 3 times)") for text in again)
    logs = Path(cluster.head_node.get_logs_dir_path()).glob("worker-*.out")
    assert any("continues after step" in log.read_text(errors="replace") for log in logs)
    assert list(scratch.iterdir()) == []  # finished cells leave nothing
