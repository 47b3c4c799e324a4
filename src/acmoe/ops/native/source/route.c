/* The top-k router for tokens x, or for rescaled tokens x * scale[cluster].

   ops/route/reference.py defines the results. A rescaled token is rounded to float32 before its
   products, as in the definition. */

#include "route.h"

enum { AT_ONCE = 4 }; /* tokens whose affinities are computed side by side */

/* Return the rescaled token: x itself, or its product in `memory`. */
static inline const float *rescaled(const struct router *of, int64_t t, float *memory) {
    const float *x = of->x + t * of->D, *scale = scale_of(of, t);
    if (scale == NULL) return x;
    EACH
    for (int64_t d = 0; d < of->D; d++) memory[d] = x[d] * scale[d];
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

/* Write the affinities (E,) of AT_ONCE tokens from t on. memory: room for as many rescaled tokens. */
static inline void affinities(const struct router *of, const float *packed, const float *bias,
                              int64_t t, float *memory, float *affinity) {
    const int64_t D = of->D, E = of->E, number = of->T - t < AT_ONCE ? of->T - t : AT_ONCE;
    const float *token[AT_ONCE];
    for (int64_t i = 0; i < AT_ONCE; i++)
        token[i] = rescaled(of, t + (i < number ? i : 0), memory + i * D);
    for (int64_t first = 0; first < E; first += LANES) {
        const float *block = packed + first * D;
        lanes a = {0}, b = {0}, c = {0}, d = {0};
        for (int64_t j = 0; j < D; j++) {
            const lanes w = *(const loose *)(block + j * LANES);
            a += token[0][j] * w;
            b += token[1][j] * w;
            c += token[2][j] * w;
            d += token[3][j] * w;
        }
        const lanes sums[AT_ONCE] = {a, b, c, d};
        const lanes add = bias == NULL ? (lanes){0} : load(bias + first, E - first);
        for (int64_t i = 0; i < number; i++)
            store(affinity + (t + i) * E + first, sums[i] + add, E - first);
    }
}

/* Write the columns of the K largest values, largest first, lowest column among equal ones. */
static void choose(const float *value, int64_t E, int64_t K, int64_t *ids, float *best) {
    int64_t number = 0;
    for (int64_t e = 0; e < E; e++) {
        if (number == K && !(value[e] > best[K - 1])) continue;
        int64_t place = number < K ? number++ : K - 1;
        for (; place > 0 && value[e] > best[place - 1]; place--) {
            best[place] = best[place - 1];
            ids[place] = ids[place - 1];
        }
        best[place] = value[e];
        ids[place] = e;
    }
}

/* Write the gates (T, K). */
static void gates(const struct router *of, const float *affinity, const int64_t *ids, float *gate) {
    for (int64_t t = 0; t < of->T; t++) {
        const float *value = affinity + t * of->E;
        const int64_t *chosen = ids + t * of->K;
        for (int64_t k = 0; k < of->K; k++)
            gate[t * of->K + k] = value[chosen[k]] - value[chosen[0]];
    }
    softmax(gate, of->T, of->K, 1.0f);
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
    const int64_t packs = padded(E) * D;
    double *sums = calloc((size_t)E, sizeof(double));
    float *packed = malloc((size_t)(packs + AT_ONCE * D + T * E + K) * sizeof(float));
    if (sums == NULL || packed == NULL) {
        free(sums);
        free(packed);
        return NO_MEMORY;
    }
    float *memory = packed + packs, *all = memory + AT_ONCE * D, *best = all + T * E;
    pack(&of, packed);
    for (int64_t t = 0; t < T; t += AT_ONCE) affinities(&of, packed, bias, t, memory, affinity);
    const int finite = within(affinity, T * E, FLT_MAX);
    if (finite) {
        for (int64_t t = 0; t < T; t++) {
            choose(affinity + t * E, E, K, ids + t * K, best);
            first[t] = ids[t * K];
        }
        if (over_selected) {
            gates(&of, affinity, ids, gate);
        } else {
            softmax_of_all(&of, affinity, ids, 1.0f, all);
            for (int64_t i = 0; i < T * K; i++) gate[i] = all[i / K * E + ids[i]];
        }
    }
    if (finite && gate_sum != NULL) {
        if (over_selected || factor != 1.0f) softmax_of_all(&of, affinity, ids, factor, all);
        for (int64_t t = 0; t < T; t++) {
            EACH
            for (int64_t e = 0; e < E; e++) sums[e] += all[t * E + e];
        }
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
    free(packed);
    return finite ? SERVED : NOT_SERVED;
}
