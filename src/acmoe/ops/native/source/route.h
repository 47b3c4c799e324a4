/* What the forward and the backward of the router share.

   Both take eight tokens at a time: each is a lane of the vectors that compute choices, gates and
   their gradients. "Columns" (E, 8) hold a number of each expert for these tokens. */

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

/* Write where the rows of eight tokens begin, `width` numbers each; the first one stands for those
   beyond `number`. */
static inline void places(int64_t number, int64_t width, int64_t *at) {
    for (int64_t i = 0; i < LANES; i++) at[i] = i < number ? i * width : 0;
}

/* Return a column of these rows: a number of each token. */
static inline lanes column(const float *from, const int64_t *at) {
    return (lanes){from[at[0]], from[at[1]], from[at[2]], from[at[3]],
                   from[at[4]], from[at[5]], from[at[6]], from[at[7]]};
}

/* Write exp((value - most) * factor) of `number` columns, and return the sum of each lane. */
static inline lanes exponentials(const lanes *value, int64_t number, lanes most, float factor, lanes *out) {
    for (int64_t n = 0; n < number; n++) out[n] = (value[n] - most) * factor;
    float *flat = (float *)out;
    EACH
    for (int64_t i = 0; i < number * LANES; i++) flat[i] = exp_of(flat[i]);
    lanes sum = out[0];
    for (int64_t n = 1; n < number; n++) sum += out[n];
    return sum;
}

/* Return the derivative of the balance loss, E * sum_e load_e / (T K) * gate_sum_e / T, by the gate
   sum of an expert with this load. */
static inline double balance_share(const struct router *of, float load) {
    return (double)of->E * load / ((double)(of->T * of->K) * (double)of->T);
}

#endif
