"""Shared-memory staging buffer that skews relative-position scores: stored and loaded with
different row pitches.

Query i meets key j in column W - S - i + j of the relative-position embedding. The scores of a tile
of keys are therefore read one column further right in row i than in row i + 1. The kernel stores
score tiles q @ rel_emb with one row pitch and loads them with another, which performs the skew. A
warpgroup takes every second query of a program, so its rows are two columns apart, and the scores
of an even query are loaded as words of two elements. No data is moved between steps: each step
stores its 64 new columns behind those of the step before, over columns that the following rows no
longer need.

Position of a row. In the register layout of the tensor cores, the eight rows that a warp accesses
together are m, m + 1, .. m + 7 for m a multiple of 8. Row m is stored at position
8 * (m % 8) + m // 8, so these eight rows are 8 positions, a multiple of 16 columns, apart. Padding
of eight elements after every eighth position puts them into different banks, for stores and for
loads. Queries are ordered by position.

Shapes as in forward.py. Each warpgroup has a buffer of its own (`staging_words` words).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from acmoe.ops.device.gluon_blocks import acc_layout
from acmoe.ops.device.gluon_names import reinterpret

ROWS = gl.constexpr(64)  # queries per warpgroup
QUERIES = gl.constexpr(128)  # queries per program
KEYS = gl.constexpr(64)  # keys per tile, and new columns of rel_emb per step


def _padded_layout(paddings: list[list[int]], word_elements: int) -> gl.PaddedSharedLayout:
    """Layout of the 32 rows m of a warpgroup with bit 3 unset, 128 words each.

    A word has `word_elements` elements. `paddings` are [interval, padding] in words; a padding
    after every 128 / 4 words widens the row pitch by four times that padding.
    """
    columns = [[0, 1 << bit] for bit in range((127 * word_elements).bit_length())]
    positions = [[row, 0] for row in (8, 16, 1, 2, 4)]
    pairs = [[interval * word_elements, padding * word_elements] for interval, padding in paddings]
    return gl.PaddedSharedLayout(pairs, columns + positions, [], [32, 128 * word_elements])


# Words per row as loaded: 192 columns, for 126 columns of skew and a tile of 64.
_LOAD_PITCH = gl.constexpr(96)
_STORE_LAYOUT = gl.constexpr(_padded_layout([[32, 16], [128, 2], [512, 4]], 2))  # 2 rows: 194 words
_LOAD_LAYOUT = gl.constexpr(_padded_layout([[32, 16], [512, 4]], 1))  # 2 rows: 192 words
SCORE = gl.constexpr(acc_layout(64))
_PAIR_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 32],
    )
)  # words of one half of SCORE's rows: bit 3 of m unset, or set


def staging_words(span: int) -> int:
    """Return the size of one warpgroup's buffer in words.

    64 rows of 97 words, 4 words of padding after each eighth of them, and 32 words per step.
    """
    steps = -(-(span + 127) // 64) + 1
    return 64 * 97 + 8 * 4 + 32 * (steps + 4)


@gluon.jit
def query_of_row(m, GROUP: gl.constexpr):
    """Return the query of row m of warpgroup GROUP, relative to the program's first query."""
    position = m % 8 * 8 + m // 8
    return 2 * position + GROUP


@gluon.jit
def stage_scores(staging, tile, score, dtype: gl.constexpr):
    """Store a (64, 64) tile of relative-position scores behind the tiles before it.

    The rows with bit 3 of m unset are stored first, then those with bit 3 set: within each half the
    addresses of a thread differ by constants.
    """
    halves = gl.split(score.to(dtype).reshape([4, 2, 8, KEYS]).permute([0, 2, 3, 1]))
    for half in gl.static_range(2):
        start = staging.index(tile * (KEYS // 2) + half * (_LOAD_PITCH + 1))
        view = reinterpret(start, dtype, [ROWS // 2, 256], _STORE_LAYOUT)
        view.slice(0, KEYS, 1).store(halves[half].reshape([ROWS // 2, KEYS]))


@gluon.jit
def _low_half(words, dtype: gl.constexpr):
    """Convert the low 16 bits of each word to float32."""
    if dtype == gl.bfloat16:
        return (words << 16).to(gl.float32, bitcast=True)
    return words.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def _high_half(words, dtype: gl.constexpr):
    """Convert the high 16 bits of each word to float32."""
    if dtype == gl.bfloat16:
        return (words & -65536).to(gl.float32, bitcast=True)
    return (words >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def _load_words(staging, first):
    """Load (32, 32) words of one half of the rows, skewed, from word `first` on."""
    view = reinterpret(staging.index(first), gl.int32, [ROWS // 2, 128], _LOAD_LAYOUT)
    return view.slice(0, KEYS // 2, 1).load(_PAIR_LAYOUT)


@gluon.jit
def _load_pairs(staging, first, dtype: gl.constexpr, GROUP: gl.constexpr):
    """Load one half of the rows as pairs of elements; a pair of an odd query spans two words."""
    words = _load_words(staging, first + 1)
    if GROUP == 0:
        return gl.join(_low_half(words, dtype), _high_half(words, dtype))
    return gl.join(_high_half(_load_words(staging, first), dtype), _low_half(words, dtype))


@gluon.jit
def load_skewed_scores(staging, step, dtype: gl.constexpr, GROUP: gl.constexpr):
    """Load the (64, 64) float32 relative-position scores of step `step`, with keys as columns."""
    first = step * (KEYS // 2) + QUERIES // 2 - 1  # the first query's columns begin last
    low = _load_pairs(staging, first, dtype, GROUP)
    high = _load_pairs(staging, first + _LOAD_PITCH, dtype, GROUP)
    both = gl.join(low, high).reshape([4, 8, KEYS // 2, 2, 2]).permute([0, 4, 1, 2, 3])
    return gl.convert_layout(both.reshape([ROWS, KEYS]), SCORE, assert_trivial=True)
