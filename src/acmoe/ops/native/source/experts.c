/* The products of few rows with the weights of small experts, and the sum of each token's rows.

   ops/experts/reference.py defines the results. BLAS takes longer to begin than these products. */

#include "acmoe.h"

static inline float at_least_zero(float v) { return v < 0.0f ? 0.0f : v; } /* NaN stays NaN */

/* Return True if the rows of the experts follow each other and fill all N. */
static int ends_at(const int64_t *offsets, int64_t E, int64_t N) {
    int64_t before = 0;
    for (int64_t e = 0; e < E; e++) {
        if (offsets[e] < before) return 0;
        before = offsets[e];
    }
    return before == N;
}

/* Write out (N, O): each row times the (O, I) weight of its expert, plus its bias. Rows are sorted
   by expert: those of expert e end at offsets[e]. With a permutation, row n is the token
   x[permutation[n] / top_k], else x[n].

   NOT_SERVED: rows that do not exist, or rows without an expert. */
int acmoe_rows_times_weights(const float *x, const int64_t *permutation, int64_t top_k,
                             const int64_t *offsets, const float *weight, const float *bias,
                             int64_t N, int64_t E, int64_t I, int64_t O, int relu, float *out) {
    if (!ends_at(offsets, E, N)) return NOT_SERVED;
    if (permutation != NULL && outside(permutation, N, 0, N)) return NOT_SERVED;
    int64_t begin = 0;
    for (int64_t e = 0; e < E; e++) {
        const float *w = weight + e * O * I;
        int64_t n = begin;
        /* Four rows share each load of the weight. */
        for (; n + 4 <= offsets[e]; n += 4) {
            const float *row[4];
            for (int i = 0; i < 4; i++)
                row[i] = x + (permutation == NULL ? n + i : permutation[n + i] / top_k) * I;
            for (int64_t o = 0; o < O; o++) {
                const float *v = w + o * I, *a = row[0], *b = row[1], *c = row[2], *d = row[3];
                float sa = 0, sb = 0, sc = 0, sd = 0;
                SUM_OVER(sa, sb, sc, sd)
                for (int64_t i = 0; i < I; i++) {
                    sa += v[i] * a[i];
                    sb += v[i] * b[i];
                    sc += v[i] * c[i];
                    sd += v[i] * d[i];
                }
                const float add = bias == NULL ? 0.0f : bias[e * O + o];
                const float sums[4] = {sa + add, sb + add, sc + add, sd + add};
                for (int i = 0; i < 4; i++)
                    out[(n + i) * O + o] = relu ? at_least_zero(sums[i]) : sums[i];
            }
        }
        for (; n < offsets[e]; n++) {
            const float *a = x + (permutation == NULL ? n : permutation[n] / top_k) * I;
            for (int64_t o = 0; o < O; o++) {
                const float *v = w + o * I;
                float sum = 0;
                SUM_OVER(sum)
                for (int64_t i = 0; i < I; i++) sum += v[i] * a[i];
                sum += bias == NULL ? 0.0f : bias[e * O + o];
                out[n * O + o] = relu ? at_least_zero(sum) : sum;
            }
        }
        begin = offsets[e];
    }
    return SERVED;
}

/* Write out (T, D): the sum over k of gate[t, k] * y[inverse[t * K + k]]. NOT_SERVED: rows that do
   not exist. */
int acmoe_combine(const float *y, const int64_t *inverse, const float *gate, int64_t T, int64_t K,
                  int64_t D, float *out) {
    if (outside(inverse, T * K, 0, T * K)) return NOT_SERVED;
    for (int64_t t = 0; t < T; t++) {
        float *sum = out + t * D;
        memset(sum, 0, sizeof(float) * (size_t)D);
        for (int64_t k = 0; k < K; k++) {
            const float g = gate[t * K + k], *row = y + inverse[t * K + k] * D;
            EACH
            for (int64_t d = 0; d < D; d++) sum[d] += g * row[d];
        }
    }
    return SERVED;
}
