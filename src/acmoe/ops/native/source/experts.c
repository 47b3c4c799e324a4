/* The products of few rows with the weights of small experts, and the sum of each token's rows.

   ops/experts/reference.py defines the results. BLAS takes longer to begin than these products. */

#include "experts.h"

#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (marks){__VA_ARGS__})
#endif

/* Return the sums of the lanes of eight vectors, in the order of the vectors. */
INLINE lanes sums_of(const lanes *v) {
    lanes two[4], four[2];
    UNROLLED
    for (int i = 0; i < 4; i++)
        two[i] = PICK(v[2 * i], v[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
                 PICK(v[2 * i], v[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    UNROLLED
    for (int i = 0; i < 2; i++)
        four[i] = PICK(two[2 * i], two[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  PICK(two[2 * i], two[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           PICK(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* The weights (O, I) and biases (O,), or NULL, of an expert. */
struct layer {
    const float *weight, *bias;
    int64_t I, O;
    int relu;
};

/* Add the products of inputs i to i + LANES, or the `width` that are left, to eight sums. */
INLINE void add_products(const float *const *row, int rows, const float *const *w, int64_t i,
                         int64_t width, lanes *sum) {
    const int outputs = LANES / rows;
    UNROLLED
    for (int q = 0; q < outputs; q++) {
        const lanes v = load(w[q] + i, width);
        UNROLLED
        for (int r = 0; r < rows; r++) sum[r * outputs + q] += v * load(row[r] + i, width);
    }
}

/* Write eight results: o and the next ones of one, two or four rows. Those of row r begin at out + r O. */
INLINE void write_tile(const struct layer *of, const float *const *row, int rows, int64_t o,
                       int64_t left, float *out) {
    const int outputs = LANES / rows;
    lanes sum[LANES] = {{0}}, bias = {0};
    const float *w[LANES];
    for (int q = 0; q < outputs; q++) w[q] = of->weight + (o + (q < left ? q : 0)) * of->I;
    int64_t i = 0;
    for (; i + LANES <= of->I; i += LANES) add_products(row, rows, w, i, LANES, sum);
    if (i < of->I) add_products(row, rows, w, i, of->I - i, sum);
    for (int j = 0; of->bias != NULL && j < LANES; j++)
        bias[j] = of->bias[o + (j % outputs < left ? j % outputs : 0)];
    lanes found = sums_of(sum) + bias;
    const lanes zero = {0};
    if (of->relu) found = either(found < zero, zero, found); /* NaN stays NaN */
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < left; q++) out[r * of->O + o + q] = found[r * outputs + q];
}

/* Write all results of a few rows. */
INLINE void write_results(const struct layer *of, const float *const *row, int rows, float *out) {
    const int outputs = LANES / rows;
    int64_t o = 0;
    for (; o + outputs <= of->O; o += outputs) write_tile(of, row, rows, o, outputs, out);
    if (o < of->O) write_tile(of, row, rows, o, of->O - o, out);
}

/* From this many rows of an expert on, to exchange the axes of its weight first takes less time. */
enum { MANY_ROWS = 32 };

/* Write the weight (O, I) as (I, O). */
static void exchange_axes(const float *weight, int64_t O, int64_t I, float *to) {
    for (int64_t o = 0; o < O; o += LANES)
        for (int64_t i = 0; i < I; i++)
            for (int64_t j = o; j < o + LANES && j < O; j++) to[i * O + j] = weight[j * I + i];
}

/* Add the bias (O,), unless it is NULL, to a row of results, and apply relu, if wanted. */
static void finish(const float *bias, int64_t O, int relu, float *out) {
    for (int64_t o = 0; o < O; o++) {
        const float found = out[o] + (bias == NULL ? 0.0f : bias[o]);
        out[o] = relu && found < 0.0f ? 0.0f : found; /* NaN stays NaN */
    }
}

/* Write out (N, O): each row times the (O, I) weight of its expert, plus its bias. Rows are sorted
   by expert: those of expert e end at offsets[e]. With a permutation, row n is the token
   x[permutation[n] / top_k], else x[n].

   NOT_SERVED: rows that do not exist, or rows without an expert. NO_MEMORY: for a weight and its rows. */
int acmoe_rows_times_weights(const float *x, const int64_t *permutation, int64_t top_k,
                             const int64_t *offsets, const float *weight, const float *bias,
                             int64_t N, int64_t E, int64_t I, int64_t O, int relu, float *out) {
    if (!ends_at(offsets, E, N)) return NOT_SERVED;
    if (permutation != NULL && outside(permutation, N, 0, N)) return NOT_SERVED;
    float *memory = NULL; /* an exchanged weight, and the rows that are gathered for it */
    int64_t n = 0;
    for (int64_t e = 0; e < E; e++) {
        const int64_t number = offsets[e] - n;
        if (number >= MANY_ROWS) {
            if (memory == NULL) memory = malloc(sizeof(float) * (size_t)(I * O + N * I));
            if (memory == NULL) return NO_MEMORY;
            exchange_axes(weight + e * O * I, O, I, memory);
            float *gathered = memory + I * O;
            for (int64_t r = 0; permutation != NULL && r < number; r++)
                memcpy(gathered + r * I, x + permutation[n + r] / top_k * I, sizeof(float) * (size_t)I);
            const struct product of = {permutation == NULL ? x + n * I : gathered, memory, I, 1, I, O};
            multiply(&of, number, out + n * O);
            for (; n < offsets[e]; n++) finish(bias == NULL ? NULL : bias + e * O, O, relu, out + n * O);
            continue;
        }
        const struct layer of = {weight + e * O * I, bias == NULL ? NULL : bias + e * O, I, O, relu};
        while (n < offsets[e]) {
            const int64_t left = offsets[e] - n, rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            const float *row[4];
            for (int64_t r = 0; r < rows; r++)
                row[r] = x + (permutation == NULL ? n + r : permutation[n + r] / top_k) * I;
            if (rows == 4)
                write_results(&of, row, 4, out + n * O);
            else if (rows == 2)
                write_results(&of, row, 2, out + n * O);
            else
                write_results(&of, row, 1, out + n * O);
            n += rows;
        }
    }
    free(memory);
    return SERVED;
}

/* Write out (N, F): silu of the first half of each row of h (N, 2F) times the second. */
int acmoe_swiglu(const float *h, int64_t N, int64_t F, float *out) {
    for (int64_t n = 0; n < N; n++) {
        const float *gate = h + n * 2 * F, *up = gate + F;
        EACH
        for (int64_t f = 0; f < F; f++) out[n * F + f] = gate[f] * sigmoid(gate[f]) * up[f];
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
