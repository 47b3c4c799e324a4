/* Theorem 1's weights by Newton's method, as `solve` of ops/statistics/optimum.py defines them. */

#include "acmoe.h"

/* Write the weights (R, D) of dispersions s (R, D) and lambdas (R,); each row sums to one. */
int acmoe_theorem_weights(const double *s, const double *lam, int64_t R, int64_t D, int steps,
                          double most_ratio, double *weight) {
    for (int64_t r = 0; r < R; r++) {
        const double *row = s + r * D;
        double *t = weight + r * D; /* becomes the weights at the end */
        double least = row[0], sum = 0.0;
        int64_t bad = 0; /* NaN, which comparisons lose */
        for (int64_t d = 1; d < D; d++) least = row[d] < least ? row[d] : least;
        SUM_OVER(sum, bad)
        for (int64_t d = 0; d < D; d++) {
            const double ratio = (row[d] - least) / lam[r];
            bad += ratio != ratio;
            t[d] = ratio < most_ratio ? ratio : most_ratio;
            sum += t[d];
        }
        double u = 1.0 - sum / (double)D;
        if (u < 1.0 / (double)D) u = 1.0 / (double)D;
        for (int step = 0; step < steps; step++) {
            double total = 0.0, squares = 0.0;
            SUM_OVER(total)
            for (int64_t d = 0; d < D; d++) total += 1.0 / (t[d] + u);
            const double mean = total / (double)D;
            SUM_OVER(squares)
            for (int64_t d = 0; d < D; d++) {
                const double ratio = 1.0 / (t[d] + u) / mean;
                squares += ratio * ratio;
            }
            /* squares / D is dH/du. Rounding may move a converged u by an ulp: it stays in (0, 1]. */
            const double away = (1.0 - 1.0 / mean) / (squares / (double)D);
            u += away > 0.0 ? away : 0.0;
            u = u < 1.0 ? u : 1.0;
        }
        double total = 0.0;
        SUM_OVER(total)
        for (int64_t d = 0; d < D; d++) {
            t[d] = 1.0 / (t[d] + u);
            total += t[d];
        }
        for (int64_t d = 0; d < D; d++) t[d] = bad ? NAN : t[d] / total;
    }
    return SERVED;
}
