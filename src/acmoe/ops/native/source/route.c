/* The top-k router for tokens x, or for rescaled tokens x * scale[cluster].

   ops/route/reference.py defines the results. A rescaled token is rounded to float32 before its
   products, as in the definition. */

#include "route.h"

enum { BLOCK = 256 }; /* tokens whose gates are added up in float32, before they are in float64 */

/* Write the rescaled token to `memory`, and return it; without a scale, return x itself. */
static inline const float *rescaled(const struct router *of, int64_t t, float *memory) {
    const int64_t D = of->D;
    const float *x = of->x + t * D, *scale = scale_of(of, t);
    if (scale == NULL) return x;
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES)
        *(loose *)(memory + d) = *(const loose *)(x + d) * *(const loose *)(scale + d);
    for (; d < D; d++) memory[d] = x[d] * scale[d];
    return memory;
}

/* Return True if no absolute value is above the bound, and none is NaN. */
static int within(const float *values, int64_t number, float bound) {
    int bad = 0;
    PRAGMA(omp simd reduction(| : bad))
    for (int64_t i = 0; i < number; i++) bad |= !(fabsf(values[i]) <= bound);
    return !bad;
}

/* Return True if the definition certainly shrinks no token and no rescaled token. */
static int bounded(const struct router *of, int64_t C) {
    if (of->scale == NULL) return within(of->x, of->T * of->D, BOUND);
    float most = 1.0f;
    PRAGMA(omp simd reduction(max : most))
    for (int64_t i = 0; i < C * of->D; i++) most = of->scale[i] > most ? of->scale[i] : most;
    return within(of->scale, C * of->D, most) && within(of->x, of->T * of->D, 0.99f * BOUND / most);
}

/* Write the embedding as blocks of eight experts, (E / 8, D, 8); missing experts are zeros. */
static void pack(const struct router *of, float *packed) {
    const int64_t D = of->D;
    memset(packed, 0, sizeof(float) * (size_t)(padded(of->E) * D));
    for (int64_t e = 0; e < of->E; e++) {
        float *block = packed + e / LANES * LANES * D + e % LANES;
        for (int64_t d = 0; d < D; d++) block[d * LANES] = of->embedding[e * D + d];
    }
}

/* Write the affinities (8, E) of the tokens from t on, `number` of them. memory: room for as many
   rescaled tokens. */
static inline void affinities(const struct router *of, const float *packed, const float *bias,
                              int64_t t, int64_t number, float *memory, float *affinity) {
    const int64_t D = of->D, E = of->E;
    const float *token[LANES];
    for (int64_t i = 0; i < LANES; i++)
        token[i] = i < number ? rescaled(of, t + i, memory + i * D) : token[0];
    for (int64_t first = 0; first < E; first += LANES) {
        const float *block = packed + first * D;
        const lanes add = bias == NULL ? (lanes){0} : load(bias + first, E - first);
        lanes a = add, b = add, c = add, d = add, e = add, f = add, g = add, h = add;
        for (int64_t j = 0; j < D; j++) {
            const lanes w = *(const loose *)(block + j * LANES);
            a += token[0][j] * w;
            b += token[1][j] * w;
            c += token[2][j] * w;
            d += token[3][j] * w;
            e += token[4][j] * w;
            f += token[5][j] * w;
            g += token[6][j] * w;
            h += token[7][j] * w;
        }
        const lanes sums[LANES] = {a, b, c, d, e, f, g, h};
        for (int64_t i = 0; i < LANES; i++) store(affinity + i * E + first, sums[i], E - first);
    }
}

/* Choose the K largest numbers of each lane: their columns, largest first, lowest among equal ones.
   `best` and `id` are (K, 8). */
static inline void choose(const lanes *column, int64_t E, int64_t K, lanes *best, marks *id) {
    for (int64_t k = 0; k < K; k++) {
        best[k] = (lanes){0} - INFINITY;
        id[k] = (marks){0};
    }
    for (int64_t e = 0; e < E; e++) {
        /* An expert takes the place of the first one below it, and moves the others by one. */
        lanes value = column[e];
        marks own = (marks){0} + (int32_t)e, moves = {0};
        for (int64_t k = 0; k < K; k++) {
            const lanes before = best[k];
            const marks was = id[k];
            moves |= value > before;
            best[k] = either(moves, value, before);
            id[k] = (moves & own) | (~moves & was);
            value = either(moves, before, value);
            own = (moves & was) | (~moves & own);
        }
    }
}

/* Memory of `decide`. */
struct columns {
    lanes *value, *all; /* (E, 8) affinities, and their exponentials */
    lanes *best, *gate; /* (K, 8) */
    marks *id;          /* (K, 8) */
    lanes *sum;         /* (E, 8) sums of the softmax over all experts, or NULL */
};

/* Choose the experts of eight tokens by their affinities (8, E), and write ids, gates (each (8, K))
   and first choices of the first `number`. */
static inline void decide(const struct router *of, const float *affinity, int64_t number,
                          const struct columns *to, int64_t *ids, float *gate, int64_t *first) {
    const int64_t E = of->E, K = of->K;
    int64_t at[LANES];
    places(LANES, E, at);
    for (int64_t e = 0; e < E; e++) to->value[e] = column(affinity + e, at);
    if (K == 1) choose(to->value, E, 1, to->best, to->id);
    else if (K == 2) choose(to->value, E, 2, to->best, to->id);
    else choose(to->value, E, K, to->best, to->id);
    const lanes most = to->best[0];
    lanes total = exponentials(to->best, K, most, 1.0f, to->gate);
    if (!of->over_selected) total = exponentials(to->value, E, most, 1.0f, to->all);
    for (int64_t k = 0; k < K; k++) {
        const lanes share = to->gate[k] / total;
        for (int64_t i = 0; i < number; i++) {
            ids[i * K + k] = to->id[k][i];
            gate[i * K + k] = share[i];
        }
    }
    for (int64_t i = 0; i < number; i++) first[i] = to->id[0][i];
    if (to->sum == NULL) return;
    if (of->over_selected || of->factor != 1.0f)
        total = exponentials(to->value, E, most, of->factor, to->all);
    lanes share = 1.0f / total;
    for (int64_t i = number; i < LANES; i++) share[i] = 0.0f;
    for (int64_t e = 0; e < E; e++) to->sum[e] += to->all[e] * share;
}

/* Add the sums of a block of tokens to those of all, and empty them. */
static void flush(lanes *sum, int64_t E, double *total) {
    for (int64_t e = 0; e < E; e++) {
        for (int i = 0; i < LANES; i++) total[e] += sum[e][i];
        sum[e] = (lanes){0};
    }
}

/* Route T tokens. gate_sum, load and balance may be NULL. balance: the balance loss times `weight`.

   NOT_SERVED: a token may be so large that the definition shrinks it, or is not finite. */
int acmoe_route(const float *x, const float *scale, const int64_t *cluster, const float *embedding,
                const float *bias, int64_t T, int64_t D, int64_t E, int64_t C, int64_t K,
                int over_selected, double temperature, double weight, float *affinity, int64_t *ids,
                float *gate, int64_t *first, float *gate_sum, float *load, float *balance) {
    const float factor = (float)(1.0 / temperature);
    const struct router of = {x, scale, cluster, embedding, T, D, E, K, over_selected, factor};
    if (scale != NULL && outside(cluster, T, -1, C)) return NOT_SERVED;
    if (!bounded(&of, C)) return NOT_SERVED;
    /* Everything in vectors, so that it is aligned for them. */
    const int64_t vectors = 4 * E + 3 * K + padded(E) / LANES * D + D;
    void *memory = malloc((size_t)(vectors + 1) * sizeof(lanes));
    double *sums = calloc((size_t)E, sizeof(double));
    if (memory == NULL || sums == NULL) {
        free(memory);
        free(sums);
        return NO_MEMORY;
    }
    lanes *value = aligned(memory), *all = value + E, *sum = all + E, *eight = sum + E;
    lanes *best = eight + E, *own = best + K;
    marks *id = (marks *)(own + K);
    float *scaled = (float *)(id + K), *packed = scaled + LANES * D;
    const struct columns columns = {value, all, best, own, id, gate_sum == NULL ? NULL : sum};
    pack(&of, packed);
    for (int64_t e = 0; e < E; e++) sum[e] = (lanes){0};
    int finite = 1;
    for (int64_t t = 0; t < T && finite; t += LANES) {
        const int64_t number = T - t < LANES ? T - t : LANES;
        /* The last tokens may be fewer than eight: the rest of their memory is not the caller's. */
        float *to = number < LANES ? (float *)eight : affinity + t * E;
        affinities(&of, packed, bias, t, number, scaled, to);
        if (number < LANES) memcpy(affinity + t * E, to, sizeof(float) * (size_t)(number * E));
        finite = within(to, number * E, FLT_MAX);
        decide(&of, to, number, &columns, ids + t * K, gate + t * K, first + t);
        if (gate_sum != NULL && (t % BLOCK == 0 || t + LANES >= T)) flush(sum, E, sums);
    }
    if (finite && gate_sum != NULL) {
        memset(load, 0, sizeof(float) * (size_t)E);
        for (int64_t i = 0; i < T * K; i++) load[ids[i]] += 1.0f;
        double total = 0.0;
        for (int64_t e = 0; e < E; e++) {
            gate_sum[e] = (float)sums[e];
            total += sums[e] * balance_share(&of, load[e]);
        }
        if (balance != NULL) *balance = (float)(weight * total);
    }
    free(sums);
    free(memory);
    return finite ? SERVED : NOT_SERVED;
}
