"""Products of queries and positions in shared memory, written in one shape and read in another.

Query i meets key j at column W - S - i + j of the table: a row of a tile of products is read a
column further right than the row of the next query. A tile is written as rows of one pitch and read
as rows of another. A warpgroup takes every second query of a program: its rows stand two columns
apart then, and an even query's products are read two in a word. Nothing is moved from step to step:
each writes its columns after those of the step before, into what the next row has left behind.

Where a row lies. In the layout of the matrix units the eight rows of a warp's access are m, m + 1,
.. m + 7 for m a multiple of 8. The place of row m is 8 (m % 8) + m // 8, so that these rows stand
eight places, a multiple of 16 columns, apart, and eight more numbers after every eighth place keep
the rows of both a write and a read in different banks. Queries go from the first place to the last.

Shapes as in attention_hopper.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from acmoe.ops.device.gluon_names import seen_as

ROWS = gl.constexpr(64)  # queries of a warpgroup
QUERIES = gl.constexpr(128)  # of a program
KEYS = gl.constexpr(64)  # of a tile, and new columns of the table that it needs


def _rows_at(paddings: list[list[int]], numbers: int) -> gl.PaddedSharedLayout:
    """A warpgroup's rows m with bit 3 unset, in words of `numbers`: 32 of them, `paddings` apart.
    What is added after every quarter of 128 words widens the pitch four times."""
    columns = [[0, 1 << bit] for bit in range((127 * numbers).bit_length())]
    places = [[row, 0] for row in (8, 16, 1, 2, 4)]
    pairs = [[interval * numbers, padding * numbers] for interval, padding in paddings]
    return gl.PaddedSharedLayout(pairs, columns + places, [], [32, 128 * numbers])


_HALF = gl.constexpr(96)  # words of a row as read: 192 columns, for 126 of skew and a tile
_WRITTEN = gl.constexpr(_rows_at([[32, 16], [128, 2], [512, 4]], 2))  # two rows are 194 words
_SKEWED = gl.constexpr(_rows_at([[32, 16], [512, 4]], 1))  # and as read 192
SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 32],
    )
)  # of one half of SCORE's rows


def strip_words(span: int) -> int:
    """Words of one warpgroup's products: 64 rows, eighths of them 4 apart, and the drift of 32
    words a step."""
    steps = -(-(span + 127) // 64) + 1
    return 64 * 97 + 8 * 4 + 32 * (steps + 4)


@gluon.jit
def query_of(m, GROUP: gl.constexpr):
    """The queries of rows m, from the first of the program on."""
    place = m % 8 * 8 + m // 8
    return 2 * place + GROUP


@gluon.jit
def keep_products(strip, tile, product, dtype: gl.constexpr):
    """A tile of new columns after those before it. Rows with bit 3 unset, then set: of each half
    one thread's addresses differ by constants."""
    halves = gl.split(product.to(dtype).reshape([4, 2, 8, KEYS]).permute([0, 2, 3, 1]))
    for half in gl.static_range(2):
        at = strip.index(tile * (KEYS // 2) + half * (_HALF + 1))
        view = seen_as(at, dtype, [ROWS // 2, 256], _WRITTEN)
        view.slice(0, KEYS, 1).store(halves[half].reshape([ROWS // 2, KEYS]))


@gluon.jit
def _low(words, dtype: gl.constexpr):
    if dtype == gl.bfloat16:
        return (words << 16).to(gl.float32, bitcast=True)
    return words.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def _high(words, dtype: gl.constexpr):
    if dtype == gl.bfloat16:
        return (words & -65536).to(gl.float32, bitcast=True)
    return (words >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def _skewed_words(strip, first):
    view = seen_as(strip.index(first), gl.int32, [ROWS // 2, 128], _SKEWED)
    return view.slice(0, KEYS // 2, 1).load(_PAIRS)


@gluon.jit
def _skewed_half(strip, first, dtype: gl.constexpr, GROUP: gl.constexpr):
    """Pairs of numbers, which of odd queries lie in two words."""
    words = _skewed_words(strip, first + 1)
    if GROUP == 0:
        return gl.join(_low(words, dtype), _high(words, dtype))
    return gl.join(_high(_skewed_words(strip, first), dtype), _low(words, dtype))


@gluon.jit
def skewed_products(strip, s, dtype: gl.constexpr, GROUP: gl.constexpr):
    """The products that step s meets, each under its key."""
    first = s * (KEYS // 2) + QUERIES // 2 - 1  # the first query's columns begin last
    low = _skewed_half(strip, first, dtype, GROUP)
    high = _skewed_half(strip, first + _HALF, dtype, GROUP)
    both = gl.join(low, high).reshape([4, 8, KEYS // 2, 2, 2]).permute([0, 4, 1, 2, 3])
    return gl.convert_layout(both.reshape([ROWS, KEYS]), SCORE, assert_trivial=True)
