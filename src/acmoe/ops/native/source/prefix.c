/* The scale of each token under causal statistics: 1/s of its cluster's prefix, shrunk towards a
   running average. ops/statistics/prefix defines the results.

   Tokens are read in time order, and every cluster has sums of its own, so that neither later tokens
   nor other clusters change a bit of an earlier result. B sequences of L tokens. */

#include "statistics.h"

/* The sums of one cluster: x - anchor, and what the measure adds up. */
struct sums {
    double *x, *terms; /* (D,) */
    float *anchor;     /* (D,) */
    float tokens;
};

/* What a prefix is shrunk towards. */
struct prior {
    const float *average; /* (D,) */
    double tokens;        /* 0 if the average has too few tokens to be read */
};

static int finite(const float *x, int64_t D) {
    int64_t bad = 0;
    for (int64_t d = 0; d < D; d++) bad += !(fabsf(x[d]) <= FLT_MAX);
    return bad == 0;
}

/* Add a token to the sums of its cluster, and write the shrunk dispersion; return its number of tokens. */
INLINE double pass_as(int measure, const float *x, int64_t D, struct sums *of, struct prior prior, float *s) {
    of->tokens += 1.0f;
    const double n = of->tokens, seen = n >= 2.0 ? n : 0.0; /* one token has no dispersion */
    const double number = seen + prior.tokens;
    const double inverse = 1.0 / n, below = 1.0 / (n > 1.0 ? n - 1.0 : 1.0);
    const double divided = 1.0 / (number > 1.0 ? number : 1.0);
    EACH
    for (int64_t d = 0; d < D; d++) {
        const double away = (double)(x[d] - of->anchor[d]);
        of->x[d] += away;
        const double deviation = away - of->x[d] * inverse;
        of->terms[d] += measure == MAD ? fabs(deviation) : deviation * deviation * (n * below);
        const double mean = of->terms[d] * inverse;
        const double spread = measure == STD ? sqrt(mean) : mean;
        s[d] = (float)((seen * spread + prior.tokens * prior.average[d]) * divided);
    }
    return number;
}

static double pass(int measure, const float *x, int64_t D, struct sums *of, struct prior prior, float *s) {
    if (measure == MAD) return pass_as(MAD, x, D, of, prior, s);
    if (measure == STD) return pass_as(STD, x, D, of, prior, s);
    return pass_as(VARIANCE, x, D, of, prior, s);
}

/* Begin the sums of a cluster with the moments of earlier calls. */
static void begin(struct sums *of, int64_t D, float tokens, const float *mean, const float *spread) {
    of->tokens = tokens;
    memcpy(of->anchor, mean, sizeof(float) * (size_t)D);
    for (int64_t d = 0; d < D; d++) of->x[d] = 0.0;
    for (int64_t d = 0; d < D; d++) of->terms[d] = spread[d];
}

/* Write the scale (B, L, D) of each token, and the moments after the last one: (B, C) tokens, (B, C, D)
   means and sums. mask: (B, L) of bytes, or NULL. A token that is masked, not finite or in no cluster
   gets ones.

   NOT_SERVED: a cluster does not exist. */
int acmoe_prefix_scale(const float *x, const int64_t *cluster, const uint8_t *mask, int64_t B, int64_t L,
                       int64_t D, int64_t C, int measure, const float *tokens_before,
                       const float *mean_before, const float *spread_before, const float *average,
                       const float *weight, double prior_tokens, double floor, double eps,
                       int64_t min_tokens, float *scale, float *tokens, float *mean, float *spread) {
    if (outside(cluster, B * L, -1, C)) return NOT_SERVED;
    const size_t size = (size_t)(C * D);
    struct sums *sums = malloc(sizeof(struct sums) * (size_t)C);
    double *work = malloc((2 * size + (size_t)D) * sizeof(double) + (size + (size_t)D) * sizeof(float));
    if (sums == NULL || work == NULL) {
        free(sums);
        free(work);
        return NO_MEMORY;
    }
    double *row = work + 2 * size;
    float *anchor = (float *)(row + D), *s = anchor + size;
    for (int64_t b = 0; b < B; b++) {
        const int64_t first = b * C;
        for (int64_t c = 0; c < C; c++) {
            sums[c].x = work + c * D;
            sums[c].terms = work + (C + c) * D;
            sums[c].anchor = anchor + c * D;
            begin(&sums[c], D, tokens_before[first + c], mean_before + (first + c) * D,
                  spread_before + (first + c) * D);
        }
        for (int64_t t = b * L; t < (b + 1) * L; t++) {
            const float *token = x + t * D;
            const int64_t c = cluster[t];
            if (c < 0 || (mask != NULL && !mask[t]) || !finite(token, D)) {
                for (int64_t d = 0; d < D; d++) scale[t * D + d] = 1.0f;
                continue;
            }
            if (sums[c].tokens == 0.0f) memcpy(sums[c].anchor, token, sizeof(float) * (size_t)D);
            const struct prior prior = {average + c * D, weight[c] >= (float)min_tokens ? prior_tokens : 0.0};
            const double number = pass(measure, token, D, &sums[c], prior, s);
            row_scale(s, D, number >= (double)min_tokens, floor, eps, row, scale + t * D);
        }
        for (int64_t c = 0; c < C; c++) {
            const double inverse = 1.0 / (sums[c].tokens > 1.0f ? sums[c].tokens : 1.0f);
            const int64_t at = (first + c) * D;
            tokens[first + c] = sums[c].tokens;
            for (int64_t d = 0; d < D; d++) {
                mean[at + d] = (float)(sums[c].anchor[d] + sums[c].x[d] * inverse);
                spread[at + d] = (float)sums[c].terms[d];
            }
        }
    }
    free(sums);
    free(work);
    return SERVED;
}
