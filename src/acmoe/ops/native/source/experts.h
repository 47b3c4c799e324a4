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

#endif
