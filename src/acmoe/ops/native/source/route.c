/* The top-k router for tokens x, or for rescaled tokens x * scale[cluster], and its gradients.

   ops/route/reference.py defines the results. A rescaled token is rounded to float32 before its
   products, as in the definition. */

#include "acmoe.h"

enum {
    AT_ONCE = 4, /* tokens whose affinities are computed side by side */
    BLOCK = 256  /* tokens whose gradients are added up in float32, before they are in float64 */
};

/* The tokens and the router of a call. */
struct router {
    const float *x;         /* (T, D) */
    const float *scale;     /* (C, D), or NULL: M = I */
    const int64_t *cluster; /* (T,) -1: no cluster, M = I */
    const float *embedding; /* (E, D) */
    int64_t T, D, E, K;
    int over_selected; /* 1: gates are a softmax over the chosen experts, 0: over all */
    float factor;      /* 1 / temperature of the balance loss */
};

/* Return the scale of a token, or NULL. */
static inline const float *scale_of(const struct router *of, int64_t t) {
    if (of->scale == NULL || of->cluster[t] < 0) return NULL;
    return of->scale + of->cluster[t] * of->D;
}

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

/* Replace rows of differences v <= 0 by their softmax: exp(v * factor), over its sum. */
static void softmax(float *rows, int64_t number, int64_t width, float factor) {
    EACH
    for (int64_t i = 0; i < number * width; i++) rows[i] = exp_of(rows[i] * factor);
    for (int64_t n = 0; n < number; n++) {
        float *row = rows + n * width, sum = 0.0f;
        SUM_OVER(sum)
        for (int64_t i = 0; i < width; i++) sum += row[i];
        const float share = 1.0f / sum;
        EACH
        for (int64_t i = 0; i < width; i++) row[i] *= share;
    }
}

/* Write the softmax over all experts (T, E). The first of a token's ids has the largest affinity. */
static void softmax_of_all(const struct router *of, const float *affinity, const int64_t *ids,
                           float factor, float *out) {
    for (int64_t t = 0; t < of->T; t++) {
        const float *value = affinity + t * of->E, most = value[ids[t * of->K]];
        EACH
        for (int64_t e = 0; e < of->E; e++) out[t * of->E + e] = value[e] - most;
    }
    softmax(out, of->T, of->E, factor);
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

/* Return the derivative of the balance loss, E * sum_e load_e / (T K) * gate_sum_e / T, by the gate
   sum of an expert with this load. */
static inline double balance_share(const struct router *of, float load) {
    return (double)of->E * load / ((double)(of->T * of->K) * (double)of->T);
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

/* Add the gradient of softmax(value * factor) to `to`, for the gradient `of_gate` of its results.
   gate: the results. */
static inline void add_softmax_gradient(const float *gate, const float *of_gate, int64_t number,
                                        float factor, float *to) {
    float mean = 0.0f;
    SUM_OVER(mean)
    for (int64_t i = 0; i < number; i++) mean += gate[i] * of_gate[i];
    EACH
    for (int64_t i = 0; i < number; i++) to[i] += factor * gate[i] * (of_gate[i] - mean);
}

/* The gradients of the results of a route; each may be NULL. */
struct upstream {
    const float *gate, *affinity, *gate_sum;
};

/* Write the gradients of the affinities, (T, padded E). all: room for T E floats. */
static void affinity_gradients(const struct router *of, const struct upstream *up,
                               const float *affinity, const int64_t *ids, const float *gate,
                               float *all, float *change) {
    const int64_t T = of->T, E = of->E, K = of->K, E8 = padded(E);
    if (up->affinity != NULL)
        for (int64_t t = 0; t < T; t++)
            memcpy(change + t * E8, up->affinity + t * E, sizeof(float) * (size_t)E);
    if (up->gate_sum != NULL) {
        softmax_of_all(of, affinity, ids, of->factor, all);
        for (int64_t t = 0; t < T; t++)
            add_softmax_gradient(all + t * E, up->gate_sum, E, of->factor, change + t * E8);
    }
    if (up->gate == NULL) return;
    if (!of->over_selected) softmax_of_all(of, affinity, ids, 1.0f, all);
    for (int64_t t = 0; t < T; t++) {
        const int64_t *chosen = ids + t * K;
        const float *of_gate = up->gate + t * K, *own = gate + t * K;
        float *to = change + t * E8, mean = 0.0f;
        for (int64_t k = 0; k < K; k++) mean += own[k] * of_gate[k];
        for (int64_t k = 0; k < K; k++) to[chosen[k]] += own[k] * of_gate[k];
        if (of->over_selected) {
            for (int64_t k = 0; k < K; k++) to[chosen[k]] -= own[k] * mean;
        } else {
            EACH
            for (int64_t e = 0; e < E; e++) to[e] -= all[t * E + e] * mean;
        }
    }
}

/* Add the products of eight features of the tokens [begin, end): to the tokens' gradient, if it is
   wanted, and to the embedding's. change: (T, padded E) gradients of the affinities. */
static inline void feature_gradients(const struct router *of, const float *change, const float *packed,
                                     const float *given, int64_t begin, int64_t end, int64_t d,
                                     int64_t e, float *grad_x, double *grad_embedding) {
    const int64_t D = of->D, rest = D - d, E8 = padded(of->E);
    lanes w[LANES], sum[LANES];
    for (int i = 0; i < LANES; i++) {
        w[i] = load(packed + (e + i) * padded(D) + d, LANES);
        sum[i] = (lanes){0};
    }
    for (int64_t t = begin; t < end; t++) {
        const float *a = change + t * E8 + e, *scale = scale_of(of, t);
        const lanes x = load(of->x + t * D + d, rest);
        const lanes s = scale == NULL ? (lanes){1, 1, 1, 1, 1, 1, 1, 1} : load(scale + d, rest);
        const lanes y = x * s;
        for (int i = 0; i < LANES; i++) sum[i] += a[i] * y;
        if (grad_x == NULL) continue;
        lanes down = {0};
        for (int i = 0; i < LANES; i++) down += a[i] * w[i];
        float *to = grad_x + t * D + d;
        const float *from = e > 0 ? to : given == NULL ? NULL : given + t * D + d;
        store(to, (from == NULL ? (lanes){0} : load(from, rest)) + down * s, rest);
    }
    for (int i = 0; i < LANES && e + i < of->E; i++)
        for (int64_t j = 0; j < LANES && j < rest; j++)
            grad_embedding[(e + i) * D + d + j] += sum[i][j];
}

/* Write the gradients of x (T, D), embedding (E, D) and bias (E,); grad_x and grad_bias may be NULL.

   The gradients of the results may be NULL. of_balance: that of the balance loss with this weight
   and load. of_x: the gradient of x from its other readers, which is added. */
int acmoe_route_backward(const float *x, const float *scale, const int64_t *cluster,
                         const float *embedding, int64_t T, int64_t D, int64_t E, int64_t K,
                         int over_selected, double temperature, double weight,
                         const float *affinity, const int64_t *ids, const float *gate,
                         const float *load, const float *of_gate, const float *of_affinity,
                         const float *of_sum, const float *of_balance, const float *of_x,
                         float *grad_x, float *grad_embedding, float *grad_bias) {
    const float factor = (float)(1.0 / temperature);
    const struct router of = {x, scale, cluster, embedding, T, D, E, K, over_selected, factor};
    const int64_t E8 = padded(E), D8 = padded(D);
    double *sums = calloc((size_t)(E * D + E), sizeof(double));
    float *change = calloc((size_t)(T * E8 + E8 * D8 + E + T * E), sizeof(float));
    if (sums == NULL || change == NULL) {
        free(sums);
        free(change);
        return NO_MEMORY;
    }
    float *rows = change + T * E8, *of_sums = rows + E8 * D8, *all = of_sums + E;
    double *bias = sums + E * D;
    for (int64_t e = 0; e < E; e++) {
        if (of_balance != NULL) of_sums[e] = (float)(*of_balance * weight * balance_share(&of, load[e]));
        if (of_sum != NULL) of_sums[e] += of_sum[e];
        memcpy(rows + e * D8, embedding + e * D, sizeof(float) * (size_t)D);
    }
    const int balanced = of_balance != NULL || of_sum != NULL;
    const struct upstream up = {of_gate, of_affinity, balanced ? of_sums : NULL};
    affinity_gradients(&of, &up, affinity, ids, gate, all, change);
    for (int64_t t = 0; t < T; t++) {
        EACH
        for (int64_t e = 0; e < E; e++) bias[e] += change[t * E8 + e];
    }
    for (int64_t t = 0; t < T; t += BLOCK)
        for (int64_t d = 0; d < D; d += LANES)
            for (int64_t e = 0; e < E; e += LANES)
                feature_gradients(&of, change, rows, of_x, t, t + BLOCK < T ? t + BLOCK : T, d, e,
                                  grad_x, sums);
    for (int64_t i = 0; i < E * D; i++) grad_embedding[i] = (float)sums[i];
    if (grad_bias != NULL)
        for (int64_t e = 0; e < E; e++) grad_bias[e] = (float)bias[e];
    free(sums);
    free(change);
    return SERVED;
}
