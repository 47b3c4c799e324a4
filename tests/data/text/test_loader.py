"""Every token is read where it should be, and a resumed run reads what it would have read."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.data.text.loader import IGNORED, Batch, EvaluationBatches, TrainingBatches
from acmoe.errors import UserError

few = settings(max_examples=60, deadline=None, derandomize=True)


def stream(length: int) -> np.ndarray:
    """Tokens that are their own positions, so that a batch says where it was read."""
    return np.arange(length, dtype=np.int32)


def take(batches: TrainingBatches, number: int) -> list[Batch]:
    return [next(batches) for _ in range(number)]


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.tokens, right.tokens)
        and torch.equal(left.targets, right.targets)
        and left.reset == right.reset
    )


def test_the_first_pass_reads_contiguous_rows_from_left_to_right() -> None:
    # 23 tokens in 2 rows of 11, one dropped; a row holds (11 - 1) // 4 = 2 blocks of 4.
    first, second, third = take(TrainingBatches(stream(23), batch=2, block=4), 3)
    assert first.tokens.tolist() == [[0, 1, 2, 3], [11, 12, 13, 14]]
    assert first.targets.tolist() == [[1, 2, 3, 4], [12, 13, 14, 15]]
    assert second.tokens.tolist() == [[4, 5, 6, 7], [15, 16, 17, 18]]
    assert (first.reset, second.reset, third.reset) == (True, False, True)
    assert first.tokens.dtype == first.targets.dtype == torch.int64
    assert first.tokens.is_contiguous() and first.targets.is_contiguous()
    assert first.token_mask is None


@few
@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(0, 40), st.integers(0, 3), st.integers(0, 9)
)
def test_each_pass_reads_blocks_without_gap_or_overlap_up_to_the_row_end(
    batch: int, block: int, extra: int, remainder: int, seed: int
) -> None:
    row = block + 1 + extra
    tokens = stream(row * batch + min(remainder, batch - 1))
    batches = TrainingBatches(tokens, batch=batch, block=block, seed=seed)
    previous: Batch | None = None
    for current in take(batches, 3 * (row // block + 2)):
        assert torch.equal(current.targets, current.tokens + 1)
        starts = current.tokens[:, 0]
        assert torch.equal(starts - starts[0], torch.arange(batch) * row)
        assert int(current.targets[0].max()) < row
        if current.reset:
            # A new pass starts less than one block into the row; the last one was used up.
            assert int(starts[0]) < block
            assert previous is None or int(previous.tokens[0, -1]) + block + 1 >= row
        else:
            assert previous is not None
            assert torch.equal(starts, previous.tokens[:, -1] + 1)
        previous = current


def test_the_offsets_of_later_passes_cover_the_block() -> None:
    batches = TrainingBatches(stream(40), batch=1, block=8, seed=3)
    starts = {int(batch.tokens[0, 0]) for batch in take(batches, 600) if batch.reset}
    assert starts == set(range(8))


@few
@given(st.integers(0, 30), st.integers(0, 20), st.integers(0, 5))
def test_a_resumed_run_reads_bit_for_bit_what_it_would_have_read(
    before: int, after: int, seed: int
) -> None:
    def fresh() -> TrainingBatches:
        return TrainingBatches(stream(101), batch=3, block=5, seed=seed)

    running = fresh()
    take(running, before)
    state = json.loads(json.dumps(running.state_dict()))
    resumed = fresh()
    resumed.load_state_dict(state)
    pairs = zip(take(running, after), take(resumed, after), strict=True)
    assert all(same(left, right) for left, right in pairs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_the_rows_of_all_ranks_are_the_rows_of_one_process(world_size: int) -> None:
    whole = TrainingBatches(stream(200), batch=6, block=7, seed=1)
    ranks = [
        TrainingBatches(stream(200), batch=6, block=7, seed=1, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for _ in range(20):
        expected, parts = next(whole), [next(rank) for rank in ranks]
        assert torch.equal(torch.cat([part.tokens for part in parts]), expected.tokens)
        assert {part.reset for part in parts} == {expected.reset}


def test_a_run_may_resume_on_another_number_of_ranks() -> None:
    saved = TrainingBatches(stream(200), batch=4, block=7, rank=1, world_size=2)
    take(saved, 9)
    whole = TrainingBatches(stream(200), batch=4, block=7)
    whole.load_state_dict(saved.state_dict())
    assert torch.equal(next(whole).tokens[2:], next(saved).tokens)


@pytest.mark.parametrize(
    ("key", "changed"), [("seed", 5), ("batch", 2), ("block", 3), ("tokens", 99)]
)
def test_a_run_cut_differently_does_not_resume(key: str, changed: int) -> None:
    batches = TrainingBatches(stream(100), batch=4, block=5)
    with pytest.raises(UserError, match=f"read its data with {key}={changed}, this one with {key}"):
        batches.load_state_dict(batches.state_dict() | {key: changed})


def test_different_seeds_read_different_offsets() -> None:
    def starts(seed: int) -> list[int]:
        batches = take(TrainingBatches(stream(500), batch=1, block=50, seed=seed), 100)
        return [int(batch.tokens[0, 0]) for batch in batches if batch.reset]

    assert starts(0) == starts(0) != starts(1)


@few
@given(
    st.integers(2, 60),
    st.integers(1, 6),
    st.integers(1, 8),
    st.sampled_from([1, 2, 3]),
)
def test_evaluation_scores_every_token_but_the_first_exactly_once(
    length: int, rows: int, block: int, world_size: int
) -> None:
    batch = rows * world_size
    if length - 1 < batch:
        with pytest.raises(UserError, match=f"fewer than batch={batch} rows"):
            EvaluationBatches(stream(length), batch=batch, block=block)
        return
    scored: list[tuple[int, int]] = []
    blocks = set()
    for rank in range(world_size):
        batches = EvaluationBatches(
            stream(length), batch=batch, block=block, rank=rank, world_size=world_size
        )
        blocks.add(len(batches))
        assert batches.predictions == length - 1
        assert len(list(batches)) == len(batches)
        for number, (tokens, targets, reset, mask) in enumerate(batches):
            assert reset == (number == 0)
            assert mask is not None and tokens.shape == (rows, block)
            assert bool((targets[~mask] == IGNORED).all() and (tokens[~mask] == 0).all())
            scored += zip(tokens[mask].tolist(), targets[mask].tolist(), strict=True)
    # Brute force: the predictions of one stream are token i -> token i + 1.
    assert sorted(scored) == [(i, i + 1) for i in range(length - 1)]
    assert len(blocks) == 1  # no rank waits for another


@few
@given(st.integers(10, 80), st.integers(1, 5), st.integers(1, 8))
def test_evaluation_rows_continue_from_block_to_block_and_meet_at_their_ends(
    length: int, batch: int, block: int
) -> None:
    batches = list(EvaluationBatches(stream(length), batch=batch, block=block))
    tokens = torch.cat([b.tokens for b in batches], 1)
    targets = torch.cat([b.targets for b in batches], 1)
    mask = torch.cat([b.token_mask for b in batches if b.token_mask is not None], 1)
    rows = [(t[m].tolist(), y[m].tolist()) for t, y, m in zip(tokens, targets, mask, strict=True)]
    for inputs, following in rows:
        assert inputs == list(range(inputs[0], inputs[0] + len(inputs)))
        assert following == [i + 1 for i in inputs]
    for (_, following), (inputs, _) in pairwise(rows):
        assert following[-1] == inputs[0]
    lengths = {len(inputs) for inputs, _ in rows}
    assert max(lengths) - min(lengths) <= 1


def test_the_targets_may_be_another_stream_than_the_inputs() -> None:
    clean, corrupted = stream(10), stream(10) + 100
    (batch,) = EvaluationBatches(corrupted, targets=clean, batch=1, block=9)
    assert batch.tokens.tolist() == [list(range(100, 109))]
    assert batch.targets.tolist() == [list(range(1, 10))]
    with pytest.raises(UserError, match="9 targets for 10 tokens"):
        EvaluationBatches(corrupted, targets=clean[:9], batch=1, block=9)


def test_blocks_too_large_for_the_stream_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match="20 tokens make 2 rows of 10; a block of 10"):
        TrainingBatches(stream(20), batch=2, block=10)
    # One token more a row, and the only offset left is 0.
    batches = TrainingBatches(stream(22), batch=2, block=10)
    assert [int(batch.tokens[0, 0]) for batch in take(batches, 5)] == [0] * 5


@pytest.mark.parametrize("kind", [TrainingBatches, EvaluationBatches])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 0, "block": 2}, "batch=0 must be 1 or more"),
        ({"batch": 2, "block": 0}, "block=0 must be 1 or more"),
        ({"batch": 10**30, "block": 2}, f"(batch=|make ){10**30}( rows)?"),  # at once: no list
        (
            {"batch": 3, "block": 2, "world_size": 2},
            "batch=3 rows cannot be divided among world_size=2",
        ),
        ({"batch": 2, "block": 2, "world_size": 2, "rank": 2}, "rank=2 must lie below"),
    ],
)
def test_impossible_sizes_are_refused_by_name(
    kind: type[TrainingBatches] | type[EvaluationBatches], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        kind(stream(50), **sizes)  # type: ignore[arg-type]
