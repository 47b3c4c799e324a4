"""The word swap hits what it should at the rate it should, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.data.text.stop_words import STOP_WORDS
from acmoe.data.text.swaps import swap_bytes, swap_words
from acmoe.data.text.vocabulary import ByteVocabulary, WordVocabulary
from acmoe.errors import UserError

few = settings(max_examples=40, deadline=None, derandomize=True)

NOUNS = [f"noun{i}" for i in range(50)]
SIGNS = [".", ",", "@-@", "@,@", "=", "'", "%"]
VOCABULARY = WordVocabulary(
    ("<eos>", "AAA", "<unk>", *NOUNS, "the", "of", "The", "s", "'s", "U.S.", "o'clock", *SIGNS)
)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def swapped(text: str, rate: float = 0.025, seed: int = 0, early_stop: bool = False) -> str:
    tokens = VOCABULARY.encode(text)
    corrupted, _ = swap_words(tokens, VOCABULARY, rate, generator(seed), early_stop=early_stop)
    return VOCABULARY.decode(corrupted)


@few
@given(
    st.lists(st.lists(st.sampled_from([*NOUNS, "the", ".", "@-@"])), max_size=8),
    st.floats(0.001, 0.9),
    st.integers(0, 99),
)
def test_each_line_gets_at_least_one_swap_and_the_rate_rounded_down(
    lines: list[list[str]], rate: float, seed: int
) -> None:
    tokens = VOCABULARY.encode("".join(" ".join(line) + "\n" for line in lines))
    corrupted, report = swap_words(tokens, VOCABULARY, rate, generator(seed), early_stop=False)
    ends = [-1, *np.flatnonzero(tokens == 0).tolist()]
    assert (corrupted == 0).tolist() == (tokens == 0).tolist()
    total = 0
    for line, start, end in zip(lines, ends, ends[1:], strict=False):
        nouns = sum(word in NOUNS for word in line)
        words = nouns + line.count("the")
        wanted = min(max(1, int(rate * words)) if words else 0, nouns)
        changed = corrupted[start + 1 : end] != tokens[start + 1 : end]
        assert int(changed.sum()) == wanted
        assert (corrupted[start + 1 : end][changed] == VOCABULARY.id_of("AAA")).all()
        total += wanted
    assert report.replaced == report.changed == total


@few
@given(st.lists(st.sampled_from([*NOUNS, "the"]), min_size=1, max_size=60), st.integers(0, 99))
def test_an_early_stop_leaves_out_at_most_the_last_swap(line: list[str], seed: int) -> None:
    tokens = VOCABULARY.encode(" ".join(line) + "\n")
    exact, _ = swap_words(tokens, VOCABULARY, 0.1, generator(seed), early_stop=False)
    stopped, _ = swap_words(tokens, VOCABULARY, 0.1, generator(seed), early_stop=True)
    assert int((exact != stopped).sum()) <= 1
    assert (stopped[exact == tokens] == tokens[exact == tokens]).all()


def test_an_early_stop_happens_once_in_candidates_plus_one() -> None:
    # 4,000 lines of three nouns: one swap each, three places for it, so 1 / 4 of them has none.
    # The standard deviation is sqrt(0.25 * 0.75 / 4000) = 0.0068; five of them are allowed.
    tokens = VOCABULARY.encode("noun1 the noun2 noun3\n" * 4000)
    _, report = swap_words(tokens, VOCABULARY, 0.025, generator(), early_stop=True)
    assert report.nominal == 4000
    assert abs(1 - report.replaced / 4000 - 0.25) < 5 * 0.0068


def test_a_line_that_runs_out_of_words_is_not_stopped_early() -> None:
    # Ten words at 0.5 ask for five swaps; only two nouns may be hit, and both always are.
    line = "noun1 noun2 " + "the " * 8
    for seed in range(20):
        assert swapped(line, rate=0.5, seed=seed, early_stop=True).split()[:2] == ["AAA", "AAA"]


def test_positions_are_drawn_uniformly() -> None:
    line = " ".join(NOUNS[:5]) + "\n"
    tokens = VOCABULARY.encode(line * 5000)
    corrupted, _ = swap_words(tokens, VOCABULARY, 0.025, generator(), early_stop=False)
    hits = (corrupted != tokens).reshape(5000, 6).sum(0)
    # One of five places in each line: 1000 each, standard deviation sqrt(5000*0.2*0.8) = 28.
    assert hits[5] == 0 and np.abs(hits[:5] - 1000).max() < 5 * 28


@pytest.mark.parametrize("rate", [0.025, 0.9])
def test_function_words_and_signs_are_never_touched(rate: float) -> None:
    line = "the of 's . , @-@ @,@ = ' %"
    assert all(swapped(line, rate, seed) == line for seed in range(20))


def test_a_capitalised_function_word_may_be_hit() -> None:
    assert "The" not in STOP_WORDS and "the" in STOP_WORDS
    assert swapped("The the of") == "AAA the of"


def test_a_word_with_signs_inside_becomes_unknown_and_one_with_an_apostrophe_is_one_word() -> None:
    assert swapped("U.S.") == "<unk>"
    assert swapped("o'clock") == "AAA"


def test_an_unknown_word_may_be_drawn_but_cannot_change() -> None:
    tokens = VOCABULARY.encode("<unk>\n")
    corrupted, report = swap_words(tokens, VOCABULARY, 0.5, generator(), early_stop=False)
    assert corrupted.tolist() == tokens.tolist()
    assert (report.replaced, report.changed) == (1, 0)


def test_both_words_of_one_token_may_be_drawn() -> None:
    # U and S are two words; at 0.9 of four words three are drawn, so one token is hit twice.
    tokens = VOCABULARY.encode("U.S. U.S.\n")
    corrupted, report = swap_words(tokens, VOCABULARY, 0.9, generator(), early_stop=False)
    assert (report.words, report.replaced, report.changed) == (4, 3, 2)
    assert VOCABULARY.decode(corrupted) == "<unk> <unk> \n"


def test_a_replacement_outside_the_vocabulary_is_the_unknown_word() -> None:
    vocabulary = WordVocabulary(("<eos>", "cat", "<unk>"))
    corrupted, _ = swap_words(np.array([1, 0]), vocabulary, 0.025, generator(), early_stop=False)
    assert corrupted.tolist() == [2, 0]


def test_a_last_line_without_its_end_is_a_line_too() -> None:
    assert swapped("noun1") == "AAA"


def test_the_effective_rates_are_shares_of_words_and_of_tokens() -> None:
    # 100 nouns and the end of line: floor(0.025 * 100) = 2 swaps.
    tokens = VOCABULARY.encode(" ".join(NOUNS * 2) + "\n")
    _, report = swap_words(tokens, VOCABULARY, 0.025, generator(), early_stop=False)
    assert (report.tokens, report.words, report.nominal, report.replaced) == (101, 100, 2, 2)
    assert report.word_rate == 2 / 100 and report.token_rate == 2 / 101


def test_bytes_are_replaced_at_the_rate_by_other_symbols_equally_often() -> None:
    vocabulary = ByteVocabulary(bytes(range(8)))
    clean = np.full(80_000, 3, dtype=np.uint8)
    corrupted, report = swap_bytes(clean, vocabulary, 0.05, generator())
    hits = np.bincount(corrupted, minlength=8)
    # 80,000 * 0.05 = 4,000 +- 62; each of seven others 4,000 / 7 = 571 +- 24: five of each allowed.
    assert abs(report.replaced - 4000) < 5 * 62
    assert report.replaced == report.changed == 80_000 - hits[3]
    assert np.abs(np.delete(hits, 3) - 571).max() < 5 * 24
    assert corrupted.dtype == np.uint8


@few
@given(st.binary(min_size=1, max_size=200), st.floats(0.01, 0.99), st.integers(0, 99))
def test_a_replaced_byte_always_differs_and_stays_in_the_vocabulary(
    data: bytes, rate: float, seed: int
) -> None:
    vocabulary = ByteVocabulary(bytes(range(256)))
    clean = vocabulary.encode_bytes(data).astype(np.uint8)
    corrupted, report = swap_bytes(clean, vocabulary, rate, generator(seed))
    assert int((corrupted != clean).sum()) == report.replaced
    vocabulary.decode_bytes(corrupted)


def test_one_byte_value_cannot_be_replaced() -> None:
    with pytest.raises(UserError, match="vocabulary of one byte value"):
        swap_bytes(np.zeros(5, dtype=np.uint8), ByteVocabulary(b"x"), 0.5, generator())
