/* Dispersion of each cluster (Definition 1 of the paper), and the scale computed from it.

   ops/statistics/dispersion.py and scale.py define the results. Sums over tokens are float32 within
   a block of tokens and float64 beyond it. */

#include "acmoe.h"

enum { MAD, VARIANCE, STD };
enum { BLOCK = 256 }; /* tokens that are added up in float32 */

/* The tokens of a call, and what is known of their clusters. */
struct clusters {
    const float *x;         /* (T, D) */
    const int64_t *cluster; /* (T,) */
    int64_t T, D, C;
    int64_t *first;  /* (C,) first token of each cluster, -1 for none */
    int64_t *number; /* (C,) tokens of each cluster */
    float *mean;     /* (C, D) mean, relative to the first token */
    double *sum;     /* (C, D) */
    float *part;     /* (C, D) sums of a block of tokens */
};

static void count(struct clusters *of) {
    for (int64_t c = 0; c < of->C; c++) {
        of->first[c] = -1;
        of->number[c] = 0;
    }
    for (int64_t t = of->T - 1; t >= 0; t--) {
        of->first[of->cluster[t]] = t;
        of->number[of->cluster[t]] += 1;
    }
}

/* Return the first token after the block that begins at `begin`. */
static inline int64_t end_of(const struct clusters *of, int64_t begin) {
    return begin + BLOCK < of->T ? begin + BLOCK : of->T;
}

/* Move the sums of a block to those of all tokens. */
static void flush(struct clusters *of) {
    for (int64_t i = 0; i < of->C * of->D; i++) {
        of->sum[i] += of->part[i];
        of->part[i] = 0.0f;
    }
}

/* Write the mean of each cluster relative to its first token, so that equal tokens deviate by 0. */
static void means(struct clusters *of) {
    const int64_t D = of->D;
    for (int64_t begin = 0; begin < of->T; begin += BLOCK) {
        for (int64_t t = begin; t < end_of(of, begin); t++) {
            const int64_t c = of->cluster[t];
            const float *x = of->x + t * D, *anchor = of->x + of->first[c] * D;
            float *sum = of->part + c * D;
            EACH
            for (int64_t d = 0; d < D; d++) sum[d] += x[d] - anchor[d];
        }
        flush(of);
    }
    for (int64_t c = 0; c < of->C; c++) {
        const double tokens = of->number[c] > 0 ? (double)of->number[c] : 1.0;
        for (int64_t d = 0; d < D; d++) {
            of->mean[c * D + d] = (float)(of->sum[c * D + d] / tokens);
            of->sum[c * D + d] = 0.0;
        }
    }
}

/* Write the dispersion (C, D), and return the number of entries that are not finite. */
static int64_t dispersion(struct clusters *of, int measure, float *spread) {
    const int64_t D = of->D;
    for (int64_t begin = 0; begin < of->T; begin += BLOCK) {
        for (int64_t t = begin; t < end_of(of, begin); t++) {
            const int64_t c = of->cluster[t];
            const float *x = of->x + t * D, *anchor = of->x + of->first[c] * D;
            const float *mean = of->mean + c * D;
            float *sum = of->part + c * D;
            if (measure == MAD) {
                EACH
                for (int64_t d = 0; d < D; d++) sum[d] += fabsf((x[d] - anchor[d]) - mean[d]);
            } else {
                EACH
                for (int64_t d = 0; d < D; d++) {
                    const float away = (x[d] - anchor[d]) - mean[d];
                    sum[d] += away * away;
                }
            }
        }
        flush(of);
    }
    int64_t bad = 0;
    for (int64_t c = 0; c < of->C; c++) {
        const double tokens = of->number[c] > 0 ? (double)of->number[c] : 1.0;
        for (int64_t d = 0; d < D; d++) {
            const float value = (float)(of->sum[c * D + d] / tokens);
            spread[c * D + d] = measure == STD ? sqrtf(value) : value;
            bad += !(value <= FLT_MAX);
        }
    }
    return bad;
}

/* Merge the dispersion into the mean of the pending batches, as `add_batch` of pending.py does. */
static void add(const struct clusters *of, const float *spread, float *mean, float *total, int64_t least) {
    const int64_t D = of->D;
    for (int64_t c = 0; c < of->C; c++) {
        if (of->number[c] < least) continue;
        const float number = (float)of->number[c];
        total[c] += number;
        const float share = number / total[c], rest = 1.0f - share;
        const float *new = spread + c * D;
        float *old = mean + c * D;
        /* The two forms of torch.lerp: the end is exact where the share is 1. */
        for (int64_t d = 0; d < D; d++) {
            const float away = new[d] - old[d];
            old[d] = share < 0.5f ? old[d] + share * away : new[d] - away * rest;
        }
    }
}

/* Write the scale (C, D): 1/s over its mean, ones for a cluster that does not inform. */
static void scale_of(const struct clusters *of, const float *spread, double floor, double eps,
                     int64_t min_tokens, double *weight, float *scale) {
    const int64_t D = of->D;
    for (int64_t c = 0; c < of->C; c++) {
        const float *s = spread + c * D;
        double mean = 0.0, total = 0.0;
        SUM_OVER(mean)
        for (int64_t d = 0; d < D; d++) mean += s[d];
        mean /= (double)D;
        if (of->number[c] < min_tokens || (eps == 0.0 && mean <= 0.0)) {
            for (int64_t d = 0; d < D; d++) scale[c * D + d] = 1.0f;
            continue;
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
            scale[c * D + d] = (float)(value < FLT_MIN ? FLT_MIN : value > FLT_MAX ? FLT_MAX : value);
        }
    }
}

/* Measure the clusters of x. spread, number, pending_mean, pending_count and scale may be NULL.

   NOT_SERVED: a token has no cluster, or a dispersion is not finite. */
int acmoe_statistics(const float *x, const int64_t *cluster, int64_t T, int64_t D, int64_t C,
                     int measure, float *spread, float *number, float *pending_mean,
                     float *pending_count, int64_t least, float *scale, double floor, double eps,
                     int64_t min_tokens) {
    if (outside(cluster, T, 0, C)) return NOT_SERVED;
    const size_t size = (size_t)(C * D);
    struct clusters of = {x, cluster, T, D, C, NULL, NULL, NULL, NULL, NULL};
    const size_t own = spread == NULL ? size : 0;
    char *work = calloc(1, size * (sizeof(double) + 2 * sizeof(float)) + own * sizeof(float) +
                               2 * sizeof(int64_t) * (size_t)C);
    if (work == NULL) return NO_MEMORY;
    of.sum = (double *)work;
    of.first = (int64_t *)(of.sum + size);
    of.number = of.first + C;
    of.mean = (float *)(of.number + C);
    of.part = of.mean + size;
    if (spread == NULL) spread = of.part + size;
    count(&of);
    means(&of);
    const int finite = dispersion(&of, measure, spread) == 0;
    if (finite) {
        for (int64_t c = 0; number != NULL && c < C; c++) number[c] = (float)of.number[c];
        if (scale != NULL) scale_of(&of, spread, floor, eps, min_tokens, of.sum, scale);
        if (pending_mean != NULL) add(&of, spread, pending_mean, pending_count, least);
    }
    free(work);
    return finite ? SERVED : NOT_SERVED;
}
