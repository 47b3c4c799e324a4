"""Cells on a Ray cluster (`acmoe study NAME --engine ray`), one task for each cell.

Every node needs the same version of acmoe, and the data, --work and --scratch under the same paths.
"""

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acmoe.errors import UserError, check, first_line, typed_line
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.cluster import Lost
from acmoe.lab.study.ray_worker import Job, run_task
from acmoe.lab.study.results.records import Record

WAIT = 5.0  # seconds after which the nodes are counted again


def ray_library() -> Any:
    """Import and return the `ray` package."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UserError("--engine ray needs the ray extra: pip install 'acmoe[ray]'") from error


@contextmanager
def ray_cluster(address: str | None, job: Job) -> Iterator["RayCluster"]:
    """Give a connected cluster inside `with`; the connection ends, and with it every task.

    address: as of `ray.init`; None takes RAY_ADDRESS, or starts Ray on this machine.
    """
    ray = ray_library()
    try:
        ray.init(address=address, logging_level="ERROR")
    except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--address {address}: no Ray cluster answers there ({first_line(error)}); start one "
            "with `ray start --head`, or leave --address out"
        ) from error
    try:
        yield RayCluster(ray, job, cell_resources(ray.nodes(), job.jobs, job.device))
    finally:
        ray.shutdown()


@dataclass
class RayCluster:
    """Implements `acmoe.lab.study.cluster.Cluster`."""

    ray: Any
    job: Job
    resources: Mapping[str, float]  # num_cpus, num_gpus that a cell reserves
    tasks: dict[Any, str] = field(default_factory=dict)  # digests by the references of their tasks

    def capacity(self) -> int:
        return capacity(self.ray.nodes(), self.resources)

    def start(self, cell: Cell) -> None:
        # max_retries: `run_on_cluster` starts lost cells again. max_calls: a process for each cell,
        # because compiled graphs and a broken CUDA context would reach the next one.
        remote = self.ray.remote(**self.resources, max_retries=0, max_calls=1)(run_task)
        self.tasks[remote.options(name=cell.name).remote(cell, self.job)] = cell.digest

    def ended(self) -> list[tuple[str, Record | Lost]]:
        done, _ = self.ray.wait(list(self.tasks), num_returns=1, timeout=WAIT)
        return [(self.tasks.pop(one), self._result(one)) for one in done]

    def _result(self, task: Any) -> Record | Lost:
        try:
            record: Record = self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            return Lost(typed_line(error))
        return record


def cell_resources(nodes: Sequence[Mapping[str, Any]], jobs: int, device: str) -> dict[str, float]:
    """Return what a cell reserves, so that `jobs` cells share a GPU or the cores of a node.

    Cores are those of the smallest node, divided by its GPUs if the cells run on GPUs.
    """
    found = _resources(nodes)
    with_gpu = [one for one in found if one.get("GPU", 0) >= 1]
    if device == "cpu" or (device == "auto" and not with_gpu):
        return {"num_cpus": max(1, math.floor(min(one["CPU"] for one in found) / jobs))}
    check(
        bool(with_gpu),
        f"--device {device}: no node of the Ray cluster has a GPU; use --device cpu, or start the "
        "nodes with `ray start --num-gpus`",
    )
    cores = min(one["CPU"] / one["GPU"] for one in with_gpu)
    # Ray counts GPUs in units of 1e-4: rounded up, `jobs` shares would not fit into one GPU.
    share = 1.0 if jobs == 1 else math.floor(1e4 / jobs) / 1e4
    return {"num_cpus": max(1, math.floor(cores / jobs)), "num_gpus": share}


def capacity(nodes: Sequence[Mapping[str, Any]], resources: Mapping[str, float]) -> int:
    """Return how many cells that reserve `resources` the nodes that are alive can run at once."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return sum(
        min(math.floor(node.get(names[name], 0) / need) for name, need in resources.items())
        for node in _resources(nodes)
    )


def _resources(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, float]]:
    """Return the resources of the nodes that are alive and have cores for tasks."""
    return [
        node["Resources"]
        for node in nodes
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
    ]


def check_scratch(cells: Sequence[Cell], scratch: Path | None) -> None:
    """Raise where a cell saves checkpoints and no folder is given that all nodes see."""
    from acmoe.lab.study.cells.folder import saves

    check(
        scratch is not None or not any(saves(cell.config) for cell in cells),
        "--engine ray: these cells save checkpoints, and a cell may continue on another node; give "
        "a folder that all nodes see with --scratch",
    )
