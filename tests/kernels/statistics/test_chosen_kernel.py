"""The last chosen cluster, and rows of sequences, by hand and by kernel."""

import pytest
import torch

from acmoe.ops.route.set_rows import set_rows
from acmoe.ops.statistics.chosen import clusters_up_to_last

pytest.importorskip("triton")


@pytest.mark.parametrize("backend", ["definition", "kernel"])
@pytest.mark.parametrize(
    ("ids", "clusters", "mask", "last"),
    [
        ([[0, 2], [1, 0]], [[0], [1]], None, 2),
        ([[0, 2], [1, 0]], [[4], [1]], None, 4),  # a cluster counts as a choice
        ([[0, 2], [1, 0]], [[-1], [1]], [False, True], 1),  # the first token is padding
        ([[5, 0], [5, 5]], [[-1], [-1]], None, 0),  # 5 experts: 5 means "none"
        ([[5, 5], [5, 5]], [[-1], [-1]], None, -1),
        ([[4, 0], [0, 0]], [[0], [0]], [False, False], -1),
    ],
)
def test_clusters_up_to_the_last_choice(
    backend: str,
    ids: list[list[int]],
    clusters: list[list[int]],
    mask: list[bool] | None,
    last: int,
    device: str,
) -> None:
    kernels = {one.name: one.run for one in clusters_up_to_last.kernels}
    run = clusters_up_to_last.definition if backend == "definition" else kernels["triton"]
    mask_T = None if mask is None else torch.tensor(mask, device=device)
    given = (torch.tensor(one, device=device) for one in (ids, clusters))
    assert run(*given, 5, mask_T).tolist() == [c <= last for c in range(5)]


@pytest.mark.parametrize("place", [0, 130, 399])
def test_programs_share_many_ids(place: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from acmoe.ops.statistics.triton import chosen as kernels

    monkeypatch.setattr(kernels, "_BLOCK", 16)
    monkeypatch.setattr(kernels, "_PROGRAMS", 3)
    ids = torch.zeros(200, 2, dtype=torch.int64, device=device)
    ids.view(-1)[place] = 6
    own = torch.zeros(200, 1, dtype=torch.int64, device=device)
    found = clusters_up_to_last(ids, own, 9)
    assert found.tolist() == [True] * 7 + [False] * 2


def test_rows_of_clusters_that_are_a_column_of_others(device: str) -> None:
    cluster = torch.tensor([[0, 9], [2, 9], [-1, 9], [1, 9]], device=device)[:, 0]
    for run in (set_rows, set_rows.definition):
        assert run(cluster, 2, 3).tolist() == [0, 2, -1, 4]
