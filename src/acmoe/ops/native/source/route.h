/* What the forward and the backward of the router share. */

#ifndef ACMOE_ROUTE_H
#define ACMOE_ROUTE_H

#include "acmoe.h"

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

/* Replace rows of differences v <= 0 by their softmax: exp(v * factor), over its sum. */
static inline void softmax(float *rows, int64_t number, int64_t width, float factor) {
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
static inline void softmax_of_all(const struct router *of, const float *affinity, const int64_t *ids,
                                  float factor, float *out) {
    for (int64_t t = 0; t < of->T; t++) {
        const float *value = affinity + t * of->E, most = value[ids[t * of->K]];
        EACH
        for (int64_t e = 0; e < of->E; e++) out[t * of->E + e] = value[e] - most;
    }
    softmax(out, of->T, of->E, factor);
}

/* Return the derivative of the balance loss, E * sum_e load_e / (T K) * gate_sum_e / T, by the gate
   sum of an expert with this load. */
static inline double balance_share(const struct router *of, float load) {
    return (double)of->E * load / ((double)(of->T * of->K) * (double)of->T);
}

#endif
