/* What the statistics of a batch and those of prefixes share. */

#ifndef STATISTICS_H
#define STATISTICS_H

#include "acmoe.h"

enum { MAD, VARIANCE, STD, MEAN };

/* Write the scale of one row of D dispersions: 1/s over its mean, ones if the row does not inform.

   counts: True if the row has tokens enough. weight: memory of D numbers. */
static inline void row_scale(const float *s, int64_t D, int counts, double floor, double eps,
                             double *weight, float *scale) {
    double mean = 0.0, total = 0.0;
    SUM_OVER(mean)
    for (int64_t d = 0; d < D; d++) mean += s[d];
    mean /= (double)D;
    if (!counts || !(mean <= DBL_MAX) || (eps == 0.0 && mean <= 0.0)) {
        for (int64_t d = 0; d < D; d++) scale[d] = 1.0f;
        return;
    }
    const double least = mean * floor > 1e-290 ? mean * floor : 1e-290;
    SUM_OVER(total)
    for (int64_t d = 0; d < D; d++) {
        weight[d] = 1.0 / ((s[d] > least ? s[d] : least) + eps);
        total += weight[d];
    }
    const double share = (double)D / total;
    for (int64_t d = 0; d < D; d++) {
        const double value = weight[d] * share;
        scale[d] = (float)(value < FLT_MIN ? FLT_MIN : value > FLT_MAX ? FLT_MAX : value);
    }
}

#endif
