"""Updates as CUDA graphs: what a CPU can tell of them. The replays are in test_gpu_training.py."""

from pathlib import Path

import pytest
import torch

from acmoe.errors import UserError
from acmoe.evaluate.run import open_corpus
from acmoe.train.graph import WARM_UP, StepGraph
from acmoe.train.optim import adam, set_learning_rate
from acmoe.train.text import TextTrainer
from acmoe.train.update import Update
from tiny_runs import byte_corpus, tiny_run


def test_a_cpu_has_no_graphs_and_says_so(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "graph=true")
    with pytest.raises(UserError, match=r"graph=true replays CUDA graphs; device=cpu has none"):
        TextTrainer(config, open_corpus(config.data), torch.device("cpu"))


def test_what_a_graph_reads_keeps_its_place_and_takes_new_values() -> None:
    graph = StepGraph(lambda record: pytest.fail("no step was asked for"))
    first = graph.hold("tokens", torch.tensor([1, 2]))
    again = graph.hold("tokens", torch.tensor([3, 4]))
    assert again is first and first.tolist() == [3, 4]
    assert graph.hold("tokens", first) is first  # a memory that is in its place already
    assert graph.hold(("memory", 0), torch.tensor([5.0])).tolist() == [5.0]
    with pytest.raises(AssertionError, match="tokens"):
        graph.hold("tokens", torch.tensor([3, 4, 5]))


@pytest.mark.parametrize(
    ("features", "first"),
    [(16, 2), (16, 0), (12, 1), (3, 1)],  # a word is 8 numbers: rows of two, of one and a half
)
def test_a_view_of_rows_is_kept_bit_for_bit(features: int, first: int) -> None:
    # Among them a NaN of another payload, which no arithmetic would hand on.
    bits = torch.arange(2 * 5 * features, dtype=torch.int16).view(2, 5, features)
    bits[:, first] = 0x7FC1
    source = bits.view(torch.bfloat16)
    graph = StepGraph(lambda record: pytest.fail("no step was asked for"))
    kept = graph.hold("memory", torch.zeros(2, 3, features, dtype=torch.bfloat16))
    assert graph.hold("memory", source[:, first : first + 3]) is kept
    assert torch.equal(kept.view(torch.int16), bits[:, first : first + 3])


def test_the_first_updates_of_each_kind_run_as_they_are() -> None:
    seen: list[bool] = []
    nothing = torch.zeros(())

    def step(record: bool) -> Update:
        seen.append(record)
        return Update(nothing, nothing, nothing, ())

    graph = StepGraph(step)
    for record in (False, True):
        for _ in range(WARM_UP):
            graph(record)
    assert seen == [False] * WARM_UP + [True] * WARM_UP
    graph.forget()
    graph(False)
    assert len(seen) == 2 * WARM_UP + 1


def test_a_learning_rate_that_is_a_tensor_is_changed_in_its_place() -> None:
    optimizer = adam(torch.nn.Linear(2, 2), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0)
    kept = torch.tensor(1e-3)
    optimizer.param_groups[0]["lr"] = kept
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is kept and kept.item() == 0.5
    assert optimizer.param_groups[1]["lr"] == 0.5
