"""The sliding store gives back exactly the positions in view."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.models.text.cache import SlidingStore


@settings(max_examples=40, deadline=None, derandomize=True)
@given(span=st.integers(1, 6), added=st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_a_store_shows_up_to_span_old_positions_and_all_new_ones(
    span: int, added: list[int]
) -> None:
    store = SlidingStore(span, dim=1)
    seen = 0
    for count in added:
        view = store.extend(torch.arange(seen, seen + count)[None, :, None].repeat(2, 1, 3))
        wanted = torch.arange(max(0, seen - span), seen + count)
        assert torch.equal(view, wanted[None, :, None].repeat(2, 1, 3))
        seen += count


def test_storage_is_bounded_and_moves_once_in_span_steps() -> None:
    store = SlidingStore(8, dim=0)
    moves = 0
    for position in range(1000):
        before = store.storage
        store.extend(torch.tensor([position]))
        moves += store.storage is not before
        assert store.storage is not None and len(store.storage) <= 17  # 8 kept, 1 new, 8 of room
    # Room doubles from 2 to 16 in the first steps; then every ninth step moves the window.
    assert moves <= 1000 / 8 + 4
