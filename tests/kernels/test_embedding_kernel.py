"""Rows summed by word against a float64 loop, and the lookup's gradient through them.

T rows, V words, D features; a chunk of the kernel has 16 rows, a step over a long run 32 chunks.
"""

import pytest
import torch
from torch import Tensor

from acmoe.ops.dispatch import use_backend
from acmoe.ops.embedding.op import Embedding, embedding, sum_by_word
from slow_cases import slow_on_cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def summed_by_loop(rows_TD: Tensor, ids_T: Tensor, num_words: int) -> Tensor:
    total_VD = torch.zeros(num_words, rows_TD.shape[1], dtype=torch.float64)
    for row_D, word in zip(rows_TD.double().cpu(), ids_T.tolist(), strict=True):
        total_VD[word] += row_D
    return total_VD


def runs(*lengths: int) -> Tensor:
    """Ids of which word v occurs lengths[v] times."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


IDS = {
    "one row": torch.tensor([3]),
    "each word once": torch.arange(40),
    "no two chunks alike": runs(3, 0, 20, 1, 16, 7, 33, 0, 15),
    "runs that end with their chunk": runs(16, 32, 16),
    "a run from the middle of a chunk to the middle of another": runs(8, 40, 8),
    "one word only": torch.zeros(70, dtype=torch.int64),
    "a run over more chunks than one step adds": runs(5, 16 * 70, 3),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_each_word_gets_the_sum_of_its_rows(
    ids: Tensor, generator: torch.Generator, device: str
) -> None:
    V, D = int(ids.max()) + 2, 3
    ids = ids[torch.randperm(len(ids), generator=generator)]
    rows = torch.randn(len(ids), D, generator=generator)
    found = sum_by_word(rows.to(device), ids.to(device), V).cpu()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), summed_by_loop(rows, ids, V), rtol=1e-5, atol=1e-4)
    assert (found[-1] == 0).all()  # a word that never occurs


def test_more_features_than_a_program_has_are_summed_too(
    generator: torch.Generator, device: str
) -> None:
    ids, rows = runs(3, 30), torch.randn(33, 300, generator=generator)
    found = sum_by_word(rows.to(device), ids.to(device), 2).cpu()
    torch.testing.assert_close(found.double(), summed_by_loop(rows, ids, 2), rtol=1e-5, atol=1e-4)


def test_half_precision_rows_are_added_in_float32(device: str) -> None:
    # 1 + 255 of 1/256: each addition is lost in bf16 (spacing 1/128 above 1), the sum is 1.996.
    rows = torch.full((256, 1), 1 / 256, dtype=torch.bfloat16)
    rows[0] = 1.0
    ids = torch.zeros(256, dtype=torch.int64)
    found = sum_by_word(rows.to(device), ids.to(device), 1)
    assert found.dtype == torch.bfloat16
    assert abs(float(found) - (1 + 255 / 256)) <= 1 / 128


@slow_on_cpu
def test_equal_calls_give_equal_bits(generator: torch.Generator, device: str) -> None:
    rows = torch.randn(200, 5, generator=generator).to(device)
    ids = torch.randint(4, (200,), generator=generator).to(device)
    first = sum_by_word(rows, ids, 4)
    assert all(torch.equal(sum_by_word(rows, ids, 4), first) for _ in range(3))


def test_rows_of_other_words_change_no_bit(generator: torch.Generator, device: str) -> None:
    """The sum of a word that begins a chunk depends on its own rows alone, in their order."""
    rows = torch.randn(64, 5, generator=generator)
    ids = runs(32, 32)
    mixed = torch.stack([ids[:32], ids[32:]], 1).flatten()  # 0 1 0 1 ...
    apart = sum_by_word(rows.to(device), ids.to(device), 2)
    together = torch.stack([rows[:32], rows[32:]], 1).flatten(0, 1)
    assert torch.equal(sum_by_word(together.to(device), mixed.to(device), 2), apart)


def test_no_rows_give_zeros(device: str) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert torch.equal(
        sum_by_word(torch.zeros(0, 4, device=device), none, 3), torch.zeros(3, 4, device=device)
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_lookup_and_gradient_are_those_of_torch(
    compiled: bool, generator: torch.Generator, device: str
) -> None:
    ours = Embedding(11, 6).to(device)
    theirs = torch.nn.Embedding(11, 6).to(device)
    theirs.load_state_dict(ours.state_dict())  # the same names
    ids = torch.randint(11, (4, 9), generator=generator).to(device)
    weight_BLD = torch.randn(4, 9, 6, generator=generator).to(device)
    call = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    with use_backend("triton"):
        out = call(ids)
        (out * weight_BLD).sum().backward()
    wanted = theirs(ids)
    (wanted * weight_BLD).sum().backward()
    assert torch.equal(out, wanted)
    assert ours.weight.grad is not None and theirs.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_gradients_of_the_gradient_are_lookups(device: str) -> None:
    """d/dw of sum(c * w[ids]^2) is 2 c w summed by word, and its derivative 2 c summed by word."""
    weight = torch.tensor([[1.0], [2.0], [3.0]], device=device, requires_grad=True)
    ids = torch.tensor([2, 0, 2], device=device)
    c = torch.tensor([[1.0], [10.0], [100.0]], device=device)
    with use_backend("triton"):
        value = (c * embedding(ids, weight) ** 2).sum()
        (first,) = torch.autograd.grad(value, weight, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), weight)
    assert first.flatten().tolist() == [20.0, 0.0, 606.0]  # 2*10*1, none, 2*(1+100)*3
    assert second.flatten().tolist() == [20.0, 0.0, 202.0]
