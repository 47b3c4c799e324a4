/* Dispersion of each cluster (Definition 1 of the paper), and the scale computed from it.

   ops/statistics/dispersion.py and scale.py define the results. Tokens are first sorted by cluster, so
   that sums stay in registers. Sums over the tokens of a cluster are float32 within a block of them and
   float64 beyond it. */

#include "statistics.h"

enum { BLOCK = 256 }; /* tokens that are added up in float32 */
enum { VECTORS = 4 }; /* of features that are added up at once */

/* The tokens of a call, and what is known of their clusters. */
struct clusters {
    const float *x;         /* (T, D) */
    const int64_t *cluster; /* (T,) */
    int64_t T, D, C;
    int64_t *token; /* (T,) tokens in the order of their clusters */
    int64_t *end;   /* (C,) place in `token` after each cluster's last one */
    float *mean;    /* (C, D) mean, relative to the first token */
    double *sum;    /* (C, D) */
};

static inline int64_t begin_of(const struct clusters *of, int64_t c) { return c > 0 ? of->end[c - 1] : 0; }

static inline int64_t number_of(const struct clusters *of, int64_t c) { return of->end[c] - begin_of(of, c); }

/* Sort the tokens by cluster; those of a cluster keep their order. */
static void sort(struct clusters *of) {
    memset(of->end, 0, sizeof(int64_t) * (size_t)of->C);
    for (int64_t t = 0; t < of->T; t++) of->end[of->cluster[t]] += 1;
    for (int64_t c = 1; c < of->C; c++) of->end[c] += of->end[c - 1];
    for (int64_t t = of->T - 1; t >= 0; t--) of->token[--of->end[of->cluster[t]]] = t;
    /* Now each cluster's place is its begin, which is the end of the one before. */
    for (int64_t c = 0; c + 1 < of->C; c++) of->end[c] = of->end[c + 1];
    if (of->C > 0) of->end[of->C - 1] = of->T;
}

static inline lanes magnitude(lanes v) { return (lanes)((marks)v & 0x7fffffff); }

/* Write a cluster's sums of `width` features from d on, at most VECTORS vectors of them: of the features
   relative to the first token (MEAN), or of what they deviate from their mean. */
INLINE void add_up(const struct clusters *of, int64_t c, int64_t d, int64_t width, int measure) {
    const int64_t begin = begin_of(of, c), stop = of->end[c];
    double *sum = of->sum + c * of->D + d;
    for (int64_t i = 0; i < width; i++) sum[i] = 0.0;
    lanes anchor[VECTORS] = {{0}}, mean[VECTORS] = {{0}};
    for (int v = 0; begin < stop && v < VECTORS; v++) {
        anchor[v] = load(of->x + of->token[begin] * of->D + d + v * LANES, width - v * LANES);
        if (measure != MEAN) mean[v] = load(of->mean + c * of->D + d + v * LANES, width - v * LANES);
    }
    for (int64_t block = begin; block < stop; block += BLOCK) {
        lanes part[VECTORS] = {{0}};
        const int64_t end = block + BLOCK < stop ? block + BLOCK : stop;
        for (int64_t n = block; n < end; n++) {
            const float *x = of->x + of->token[n] * of->D + d;
            for (int v = 0; v < VECTORS; v++) {
                const lanes away = (load(x + v * LANES, width - v * LANES) - anchor[v]) - mean[v];
                if (measure == MEAN)
                    part[v] += away;
                else
                    part[v] += measure == MAD ? magnitude(away) : away * away;
            }
        }
        for (int64_t i = 0; i < width; i++) sum[i] += part[i / LANES][i % LANES];
    }
}

/* Write the sums of all clusters and features. */
INLINE void add_up_all(const struct clusters *of, int measure) {
    const int64_t most = VECTORS * LANES;
    for (int64_t c = 0; c < of->C; c++) {
        int64_t d = 0;
        for (; d + most <= of->D; d += most) add_up(of, c, d, most, measure);
        if (d < of->D) add_up(of, c, d, of->D - d, measure);
    }
}

/* Write the mean of each cluster relative to its first token, so that equal tokens deviate by 0. */
static void means(struct clusters *of) {
    add_up_all(of, MEAN);
    for (int64_t c = 0; c < of->C; c++) {
        const double tokens = number_of(of, c) > 0 ? (double)number_of(of, c) : 1.0;
        for (int64_t i = c * of->D; i < (c + 1) * of->D; i++) of->mean[i] = (float)(of->sum[i] / tokens);
    }
}

/* Write the dispersion (C, D), and return the number of entries that are not finite. */
static int64_t dispersion(struct clusters *of, int measure, float *spread) {
    if (measure == MAD)
        add_up_all(of, MAD);
    else
        add_up_all(of, VARIANCE);
    int64_t bad = 0;
    for (int64_t c = 0; c < of->C; c++) {
        const double tokens = number_of(of, c) > 0 ? (double)number_of(of, c) : 1.0;
        for (int64_t i = c * of->D; i < (c + 1) * of->D; i++) {
            const float value = (float)(of->sum[i] / tokens);
            spread[i] = measure == STD ? sqrtf(value) : value;
            bad += !(value <= FLT_MAX);
        }
    }
    return bad;
}

/* Merge the dispersion into the mean of the pending batches, as `add_batch` of pending.py does. */
static void add(const struct clusters *of, const float *spread, float *mean, float *total, int64_t least) {
    const int64_t D = of->D;
    for (int64_t c = 0; c < of->C; c++) {
        const float number = (float)number_of(of, c);
        if (number_of(of, c) < least) continue;
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

/* Measure the clusters of x. spread, number, pending_mean, pending_count and scale may be NULL.

   NOT_SERVED: a token has no cluster, or a dispersion is not finite. */
int acmoe_statistics(const float *x, const int64_t *cluster, int64_t T, int64_t D, int64_t C,
                     int measure, float *spread, float *number, float *pending_mean,
                     float *pending_count, int64_t least, float *scale, double floor, double eps,
                     int64_t min_tokens) {
    if (outside(cluster, T, 0, C)) return NOT_SERVED;
    const size_t size = (size_t)(C * D);
    struct clusters of = {x, cluster, T, D, C, NULL, NULL, NULL, NULL};
    const size_t own = spread == NULL ? size : 0;
    char *work = malloc(size * sizeof(double) + (size_t)(T + C) * sizeof(int64_t) +
                        (size + own) * sizeof(float));
    if (work == NULL) return NO_MEMORY;
    of.sum = (double *)work;
    of.token = (int64_t *)(of.sum + size);
    of.end = of.token + T;
    of.mean = (float *)(of.end + C);
    if (spread == NULL) spread = of.mean + size;
    sort(&of);
    means(&of);
    const int finite = dispersion(&of, measure, spread) == 0;
    if (finite) {
        for (int64_t c = 0; number != NULL && c < C; c++) number[c] = (float)number_of(&of, c);
        for (int64_t c = 0; scale != NULL && c < C; c++)
            row_scale(spread + c * D, D, number_of(&of, c) >= min_tokens, floor, eps, of.sum, scale + c * D);
        if (pending_mean != NULL) add(&of, spread, pending_mean, pending_count, least);
    }
    free(work);
    return finite ? SERVED : NOT_SERVED;
}
