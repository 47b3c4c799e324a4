"""The lookup of words on a CPU, by every backend that can; V words, D features."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acmoe.ops import dispatch as backend
from acmoe.ops.dispatch import use_backend
from acmoe.ops.embedding.op import Embedding, embedding


@given(
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    seed=st.integers(0, 9),
)
def test_a_word_s_gradient_is_the_sum_over_its_places(ids: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight_VD = torch.randn(5, 3, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(len(ids), 3, generator=generator, dtype=torch.float64)
    found = embedding(torch.tensor(ids), weight_VD)
    assert torch.equal(found, torch.stack([weight_VD[word] for word in ids]))
    (gradient,) = torch.autograd.grad(found, weight_VD, upstream)
    for word in range(5):
        wanted = sum((upstream[i] for i, other in enumerate(ids) if other == word), torch.zeros(3))
        torch.testing.assert_close(gradient[word], wanted.double())


def test_gradcheck_agrees() -> None:
    weight_VD = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[3, 0], [3, 3]])
    assert torch.autograd.gradcheck(lambda weight: embedding(ids, weight), weight_VD)


def test_a_checkpoint_of_torch_s_embedding_is_ours() -> None:
    theirs, ours = torch.nn.Embedding(6, 4), Embedding(6, 4)
    ours.load_state_dict(theirs.state_dict())
    ids = torch.tensor([[5, 0, 5]])
    assert torch.equal(ours(ids), theirs(ids))
    assert list(ours.state_dict()) == ["weight"]


def test_equal_seeds_start_from_torch_s_numbers() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Embedding(6, 4)
    torch.manual_seed(0)
    assert torch.equal(Embedding(6, 4).weight, theirs.weight)


def test_what_cannot_run_is_said_aloud(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64 has no kernel, on any device."""
    monkeypatch.setattr(backend, "_logged", set())
    weight_VD = torch.ones(3, 2, dtype=torch.float64)
    with use_backend("triton"), caplog.at_level("WARNING", "acmoe"):
        found = embedding(torch.tensor([1]), weight_VD)
    assert found.tolist() == [[1.0, 1.0]]
    (line,) = caplog.messages
    assert line.startswith("embedding: triton cannot") and line.endswith("running on torch")
