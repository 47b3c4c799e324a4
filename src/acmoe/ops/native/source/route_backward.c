/* The gradients of the router: of the tokens, the embedding and the bias. */

#include "route.h"

enum { BLOCK = 256 }; /* tokens whose gradients are added up in float32, before they are in float64 */

/* The gradients of the results of a route; each may be NULL. */
struct upstream {
    const float *gate, *affinity, *gate_sum;
};

/* What `affinity_gradients` reads, and its memory. */
struct gates {
    const float *affinity, *gate; /* (T, E) and (T, K) */
    const int64_t *ids;           /* (T, K) */
    lanes *value, *all, *change;  /* (E, 8) */
};

/* Write the gradients of the affinities of `number` tokens from t on, rows of padded E. */
static inline void affinity_gradients(const struct router *of, const struct upstream *up,
                                      const struct gates *from, int64_t t, int64_t number, float *to) {
    const int64_t E = of->E, K = of->K, E8 = padded(E);
    lanes *value = from->value, *all = from->all, *change = from->change;
    int64_t at[LANES], chosen[LANES];
    places(number, E, at);
    places(number, K, chosen);
    const int softmax = up->gate_sum != NULL || (up->gate != NULL && !of->over_selected);
    lanes most = {0};
    for (int64_t e = 0; softmax && e < E; e++) {
        value[e] = column(from->affinity + t * E + e, at);
        most = e == 0 ? value[0] : either(value[e] > most, value[e], most);
    }
    for (int64_t e = 0; e < E; e++)
        change[e] = up->affinity == NULL ? (lanes){0} : column(up->affinity + t * E + e, at);
    if (up->gate_sum != NULL) {
        const lanes share = 1.0f / exponentials(value, E, most, of->factor, all);
        lanes mean = {0};
        for (int64_t e = 0; e < E; e++) mean += all[e] * up->gate_sum[e];
        mean *= share;
        for (int64_t e = 0; e < E; e++)
            change[e] += all[e] * share * of->factor * (up->gate_sum[e] - mean);
    }
    lanes mean = {0};
    for (int64_t k = 0; up->gate != NULL && k < K; k++)
        mean += column(from->gate + t * K + k, chosen) * column(up->gate + t * K + k, chosen);
    if (up->gate != NULL && !of->over_selected) {
        const lanes share = mean / exponentials(value, E, most, 1.0f, all);
        for (int64_t e = 0; e < E; e++) change[e] -= all[e] * share;
        mean = (lanes){0};
    }
    for (int64_t i = 0; i < number; i++)
        for (int64_t e = 0; e < E; e++) to[i * E8 + e] = change[e][i];
    for (int64_t i = 0; up->gate != NULL && i < number; i++) {
        const float *own = from->gate + (t + i) * K, *given = up->gate + (t + i) * K;
        const int64_t *id = from->ids + (t + i) * K;
        for (int64_t k = 0; k < K; k++) to[i * E8 + id[k]] += own[k] * (given[k] - mean[i]);
    }
}

/* A block of tokens [begin, end), `width` features from d on, and eight experts from e on. */
struct part {
    int64_t begin, end, d, width, e;
    const float *change; /* (T, padded E) gradients of the affinities */
};

/* Return the scale of a token's features in a part. */
static inline lanes scale_in(const struct router *of, int64_t t, const struct part *at) {
    const float *scale = scale_of(of, t);
    return scale == NULL ? (lanes){0} + 1.0f : load(scale + at->d, at->width);
}

/* Add the gradient of the embedding in a part. */
INLINE void embedding_gradient(const struct router *of, const struct part *at, double *grad_embedding) {
    lanes sum[LANES] = {{0}};
    for (int64_t t = at->begin; t < at->end; t++) {
        const float *a = at->change + t * padded(of->E) + at->e;
        const lanes x = load(of->x + t * of->D + at->d, at->width) * scale_in(of, t, at);
        for (int i = 0; i < LANES; i++) sum[i] += a[i] * x;
    }
    for (int i = 0; i < LANES && at->e + i < of->E; i++)
        for (int64_t j = 0; j < LANES && j < at->width; j++)
            grad_embedding[(at->e + i) * of->D + at->d + j] += sum[i][j];
}

/* Write the gradients of the tokens in a part, and add them to what the experts before wrote, or to
   `given`. packed: rows (padded E, padded D) of the embedding. */
INLINE void token_gradients(const struct router *of, const struct part *at, const float *packed,
                            const float *given, float *grad_x) {
    lanes w[LANES];
    for (int i = 0; i < LANES; i++) w[i] = load(packed + (at->e + i) * padded(of->D) + at->d, LANES);
    const float *before = at->e > 0 ? grad_x : given;
    for (int64_t t = at->begin; t < at->end; t++) {
        const float *a = at->change + t * padded(of->E) + at->e;
        const lanes one = a[0] * w[0] + a[1] * w[1] + a[2] * w[2] + a[3] * w[3];
        const lanes two = a[4] * w[4] + a[5] * w[5] + a[6] * w[6] + a[7] * w[7];
        lanes found = (one + two) * scale_in(of, t, at);
        if (before != NULL) found += load(before + t * of->D + at->d, at->width);
        store(grad_x + t * of->D + at->d, found, at->width);
    }
}

/* Compute both, as far as they are wanted. */
INLINE void gradients(const struct router *of, const struct part *at, const float *packed,
                      const float *given, float *grad_x, double *grad_embedding) {
    if (of->x != NULL) embedding_gradient(of, at, grad_embedding);
    if (grad_x != NULL) token_gradients(of, at, packed, given, grad_x);
}

/* Write the gradients of x (T, D), embedding (E, D) and bias (E,), those that are not NULL. x is read
   for that of the embedding, and may be NULL without it; likewise the embedding for that of x.

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
    float *change = calloc((size_t)(T * E8 + E8 * D8 + E), sizeof(float));
    void *memory = malloc((size_t)(3 * E + 1) * sizeof(lanes));
    if (sums == NULL || change == NULL || memory == NULL) {
        free(sums);
        free(change);
        free(memory);
        return NO_MEMORY;
    }
    float *rows = change + T * E8, *of_sums = rows + E8 * D8;
    double *bias = sums + E * D;
    for (int64_t e = 0; e < E; e++) {
        if (of_balance != NULL) of_sums[e] = (float)(*of_balance * weight * balance_share(&of, load[e]));
        if (of_sum != NULL) of_sums[e] += of_sum[e];
        if (embedding != NULL) memcpy(rows + e * D8, embedding + e * D, sizeof(float) * (size_t)D);
    }
    const int balanced = of_balance != NULL || of_sum != NULL;
    const struct upstream up = {of_gate, of_affinity, balanced ? of_sums : NULL};
    lanes *value = aligned(memory);
    const struct gates from = {affinity, gate, ids, value, value + E, value + 2 * E};
    for (int64_t t = 0; t < T; t += LANES)
        affinity_gradients(&of, &up, &from, t, T - t < LANES ? T - t : LANES, change + t * E8);
    for (int64_t t = 0; t < T; t++) {
        EACH
        for (int64_t e = 0; e < E; e++) bias[e] += change[t * E8 + e];
    }
    for (int64_t t = 0; t < T; t += BLOCK) {
        const int64_t end = t + BLOCK < T ? t + BLOCK : T;
        for (int64_t d = 0; d < D; d += LANES)
            for (int64_t e = 0; e < E; e += LANES) {
                /* The compiler knows the width of all but the last features. */
                const struct part full = {t, end, d, LANES, e, change};
                const struct part last = {t, end, d, D - d, e, change};
                if (D - d >= LANES) gradients(&of, &full, rows, of_x, grad_x, sums);
                else gradients(&of, &last, rows, of_x, grad_x, sums);
            }
    }
    if (grad_embedding != NULL)
        for (int64_t i = 0; i < E * D; i++) grad_embedding[i] = (float)sums[i];
    if (grad_bias != NULL)
        for (int64_t e = 0; e < E; e++) grad_bias[e] = (float)bias[e];
    free(sums);
    free(change);
    free(memory);
    return SERVED;
}
