/* The gradients of the router: of the tokens, the embedding and the bias. */

#include "route.h"

enum { BLOCK = 256 }; /* tokens whose gradients are added up in float32, before they are in float64 */

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

/* Add the products of eight features of the tokens [begin, end): to the tokens' gradient and to the
   embedding's, each if it is wanted. change: (T, padded E) gradients of the affinities. */
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
        const lanes s = scale == NULL ? (lanes){1, 1, 1, 1, 1, 1, 1, 1} : load(scale + d, rest);
        if (of->x != NULL) {
            const lanes y = load(of->x + t * D + d, rest) * s;
            for (int i = 0; i < LANES; i++) sum[i] += a[i] * y;
        }
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
        if (embedding != NULL) memcpy(rows + e * D8, embedding + e * D, sizeof(float) * (size_t)D);
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
    if (grad_embedding != NULL)
        for (int64_t i = 0; i < E * D; i++) grad_embedding[i] = (float)sums[i];
    if (grad_bias != NULL)
        for (int64_t e = 0; e < E; e++) grad_bias[e] = (float)bias[e];
    free(sums);
    free(change);
    return SERVED;
}
