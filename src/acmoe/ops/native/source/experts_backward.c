/* The gradients of the products in experts.c, of a few rows of small experts. */

#include "experts.h"

/* Write grad_x (N, I): each row of grad (N, O) times the (O, I) weight of its expert; 0 where `hidden`
   (N, I), unless it is NULL, is not positive, which is the gradient of relu.

   NOT_SERVED: rows without an expert. */
int acmoe_rows_through_weights(const float *grad, const int64_t *offsets, const float *weight,
                               const float *hidden, int64_t N, int64_t E, int64_t O, int64_t I,
                               float *grad_x) {
    if (!ends_at(offsets, E, N)) return NOT_SERVED;
    int64_t begin = 0;
    for (int64_t e = 0; e < E; e++) {
        const struct product of = {grad + begin * O, weight + e * O * I, O, 1, O, I};
        multiply(&of, offsets[e] - begin, grad_x + begin * I);
        begin = offsets[e];
    }
    /* As in torch, the gradient passes where `hidden` is NaN. */
    for (int64_t i = 0; hidden != NULL && i < N * I; i++) grad_x[i] = hidden[i] <= 0.0f ? 0.0f : grad_x[i];
    return SERVED;
}

/* Write the sums over each expert's rows: grad_weight (E, O, I) of grad (N, O) times x (N, I), and
   grad_bias (E, O) of grad. Each may be NULL.

   NOT_SERVED: rows without an expert. */
int acmoe_outer_of_rows(const float *grad, const float *x, const int64_t *offsets, int64_t N, int64_t E,
                        int64_t O, int64_t I, float *grad_weight, float *grad_bias) {
    if (!ends_at(offsets, E, N)) return NOT_SERVED;
    if (grad_bias != NULL) memset(grad_bias, 0, sizeof(float) * (size_t)(E * O));
    int64_t begin = 0;
    for (int64_t e = 0; e < E; e++) {
        const struct product of = {grad + begin * O, x + begin * I, 1, O, offsets[e] - begin, I};
        if (grad_weight != NULL) multiply(&of, O, grad_weight + e * O * I);
        for (int64_t n = begin; grad_bias != NULL && n < offsets[e]; n++) {
            EACH
            for (int64_t o = 0; o < O; o++) grad_bias[e * O + o] += grad[n * O + o];
        }
        begin = offsets[e];
    }
    return SERVED;
}

/* Write grad_h (N, 2F): the gradient of `acmoe_swiglu` from grad (N, F). */
int acmoe_swiglu_backward(const float *grad, const float *h, int64_t N, int64_t F, float *grad_h) {
    for (int64_t n = 0; n < N; n++) {
        const float *gate = h + n * 2 * F, *up = gate + F, *given = grad + n * F;
        float *of_gate = grad_h + n * 2 * F, *of_up = of_gate + F;
        EACH
        for (int64_t f = 0; f < F; f++) {
            const float share = sigmoid(gate[f]);
            of_gate[f] = given[f] * up[f] * share * (1.0f + gate[f] * (1.0f - share));
            of_up[f] = given[f] * gate[f] * share;
        }
    }
    return SERVED;
}

/* Write the gradients of `acmoe_combine`: grad_y (N, D), the gradient (T, D) of each row's token times
   the row's gate, and grad_gate (T, K), its product with y (N, D). Each may be NULL.

   NOT_SERVED: rows that do not exist. */
int acmoe_combine_backward(const float *grad, const float *y, const int64_t *inverse, const float *gate,
                           int64_t T, int64_t K, int64_t D, float *grad_y, float *grad_gate) {
    if (outside(inverse, T * K, 0, T * K)) return NOT_SERVED;
    for (int64_t t = 0; t < T; t++) {
        const float *of_token = grad + t * D;
        for (int64_t k = 0; k < K; k++) {
            const int64_t n = inverse[t * K + k];
            const float g = gate[t * K + k], *row = y + n * D;
            if (grad_y != NULL) {
                EACH
                for (int64_t d = 0; d < D; d++) grad_y[n * D + d] = g * of_token[d];
            }
            if (grad_gate == NULL) continue;
            float sum = 0;
            SUM_OVER(sum)
            for (int64_t d = 0; d < D; d++) sum += of_token[d] * row[d];
            grad_gate[t * K + k] = sum;
        }
    }
    return SERVED;
}
