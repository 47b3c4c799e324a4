/* What the forward and the backward of the experts share. */

#ifndef EXPERTS_H
#define EXPERTS_H

#include "acmoe.h"

/* Return True if the rows of the experts follow each other and fill all N. */
static inline int ends_at(const int64_t *offsets, int64_t E, int64_t N) {
    int64_t before = 0;
    for (int64_t e = 0; e < E; e++) {
        if (offsets[e] < before) return 0;
        before = offsets[e];
    }
    return before == N;
}

/* Return 1 / (1 + exp(-v)). */
static inline float sigmoid(float v) {
    const float e = exp_of(v < 0.0f ? v : -v);
    return (v < 0.0f ? e : 1.0f) / (1.0f + e);
}

enum { TILE = 4 };     /* rows of a result that are added up at once, in registers */
enum { BLOCK_K = 256 }; /* numbers that are added up before their sum is: a long sum would lose digits */

/* A sum over k of numbers times rows: out[a, i] = sum of number[a * step_a + k * step_k] * row[k, i]. */
struct product {
    const float *number, *row;
    int64_t step_a, step_k, K, I;
};

/* Write `most` rows of out from a on, in `left` columns from i on: at most two vectors of them. */
INLINE void add_up_tile(const struct product *of, int64_t a, int most, int64_t i, int64_t left,
                       float *out) {
    lanes all_low[TILE] = {{0}}, all_high[TILE] = {{0}};
    for (int64_t first = 0; first < of->K; first += BLOCK_K) {
        const int64_t end = of->K - first < BLOCK_K ? of->K : first + BLOCK_K;
        lanes low[TILE] = {{0}}, high[TILE] = {{0}};
        for (int64_t k = first; k < end; k++) {
            const float *row = of->row + k * of->I + i;
            const float *number = of->number + a * of->step_a + k * of->step_k;
            const lanes u = load(row, left), v = left > LANES ? load(row + LANES, left - LANES) : u;
            for (int j = 0; j < most; j++) {
                low[j] += number[j * of->step_a] * u;
                high[j] += number[j * of->step_a] * v;
            }
        }
        for (int j = 0; j < most; j++) {
            all_low[j] += low[j];
            all_high[j] += high[j];
        }
    }
    for (int j = 0; j < most; j++) {
        float *to = out + (a + j) * of->I + i;
        store(to, all_low[j], left);
        if (left > LANES) store(to + LANES, all_high[j], left - LANES);
    }
}

/* Write rows a to a + most of out. */
INLINE void add_up_rows(const struct product *of, int64_t a, int most, float *out) {
    int64_t i = 0;
    for (; i + 2 * LANES <= of->I; i += 2 * LANES) add_up_tile(of, a, most, i, 2 * LANES, out);
    if (i + LANES <= of->I) {
        add_up_tile(of, a, most, i, LANES, out);
        i += LANES;
    }
    if (i < of->I) add_up_tile(of, a, most, i, of->I - i, out);
}

/* Write all A rows of out. */
static inline void multiply(const struct product *of, int64_t A, float *out) {
    int64_t a = 0;
    for (; a + TILE <= A; a += TILE) add_up_rows(of, a, TILE, out);
    for (; a < A; a++) add_up_rows(of, a, 1, out);
}

#endif
