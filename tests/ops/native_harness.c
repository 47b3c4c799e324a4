/* Call every C kernel with random sizes, for the sanitizers: test_native_build.py compiles and runs
   it. Numbers are tested elsewhere. */

#include <stdio.h>

#include "acmoe.h"

int acmoe_route(const float *, const float *, const int64_t *, const float *, const float *, int64_t,
                int64_t, int64_t, int64_t, int64_t, int, double, double, float *, int64_t *, float *,
                int64_t *, float *, float *, float *);
int acmoe_route_backward(const float *, const float *, const int64_t *, const float *, int64_t, int64_t,
                         int64_t, int64_t, int, double, double, const float *, const int64_t *,
                         const float *, const float *, const float *, const float *, const float *,
                         const float *, const float *, float *, float *, float *);
int acmoe_statistics(const float *, const int64_t *, int64_t, int64_t, int64_t, int, float *, float *,
                     float *, float *, int64_t, float *, double, double, int64_t);
int acmoe_prefix_scale(const float *, const int64_t *, const uint8_t *, int64_t, int64_t, int64_t, int64_t,
                       int, const float *, const float *, const float *, const float *, const float *,
                       double, double, double, int64_t, float *, float *, float *, float *);
int acmoe_theorem_weights(const double *, const double *, int64_t, int64_t, int, double, double *);
int acmoe_sort_rows(const int64_t *, int64_t, int64_t, int64_t *, int64_t *, int64_t *, int64_t *);
int acmoe_rows_times_weights(const float *, const int64_t *, int64_t, const int64_t *, const float *,
                             const float *, int64_t, int64_t, int64_t, int64_t, int, float *);
int acmoe_combine(const float *, const int64_t *, const float *, int64_t, int64_t, int64_t, float *);
int acmoe_swiglu(const float *, int64_t, int64_t, float *);
int acmoe_swiglu_backward(const float *, const float *, int64_t, int64_t, float *);
int acmoe_rows_through_weights(const float *, const int64_t *, const float *, const float *, int64_t,
                               int64_t, int64_t, int64_t, float *);
int acmoe_outer_of_rows(const float *, const float *, const int64_t *, int64_t, int64_t, int64_t, int64_t,
                        float *, float *);
int acmoe_combine_backward(const float *, const float *, const int64_t *, const float *, int64_t, int64_t,
                           int64_t, float *, float *);

static uint64_t state = 88172645463325252ull;
static void *memory[80];
static int used = 0;

static int64_t draw(int64_t least, int64_t most) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return least + (int64_t)(state % (uint64_t)(most - least + 1));
}

static void *room(int64_t bytes) { return memory[used++] = malloc((size_t)bytes); }

/* Return random floats between -1 and 1. */
static float *floats(int64_t number) {
    float *found = room(number * 4);
    for (int64_t i = 0; i < number; i++) found[i] = (float)draw(-1000, 1000) / 1000.0f;
    return found;
}

/* Return random floats between 0 and 1. */
static float *spreads(int64_t number) {
    float *found = floats(number);
    for (int64_t i = 0; i < number; i++) found[i] = fabsf(found[i]);
    return found;
}

static int64_t *ids(int64_t number, int64_t least, int64_t most) {
    int64_t *found = room(number * 8);
    for (int64_t i = 0; i < number; i++) found[i] = draw(least, most);
    return found;
}

static int call(int round) {
    const int64_t T = draw(1, round % 7 ? 40 : 600), D = draw(1, 70), E = draw(1, 24);
    const int64_t K = draw(1, E), H = draw(1, 40), N = T * K;
    const int scaled = round & 1, biased = round & 2, selected = round & 4;
    float *x = floats(T * D), *weight = floats(E * D), *bias = floats(E), *scale = floats(E * D);
    for (int64_t i = 0; i < E * D; i++) scale[i] = fabsf(scale[i]) + 0.1f;
    int64_t *cluster = ids(T, -1, E - 1), *choice = room(N * 8), *first = room(T * 8);
    float *affinity = room(T * E * 4), *gate = room(N * 4), *sums = room(E * 4), *load = room(E * 4);
    float balance, half = 0.5f;
    int bad = acmoe_route(x, scaled ? scale : NULL, scaled ? cluster : NULL, weight,
                          biased ? bias : NULL, T, D, E, E, K, selected, 0.7, 0.1, affinity, choice,
                          gate, first, sums, load, &balance);
    float *grad_x = room(T * D * 4), *grad_weight = room(E * D * 4), *grad_bias = room(E * 4);
    bad |= acmoe_route_backward(x, scaled ? scale : NULL, scaled ? cluster : NULL, weight, T, D, E, K,
                                selected, 0.7, 0.1, affinity, choice, gate, load,
                                round % 3 ? floats(N) : NULL, round % 5 ? floats(T * E) : NULL,
                                round % 11 ? floats(E) : NULL, round % 13 ? &half : NULL,
                                biased ? floats(T * D) : NULL, round % 17 ? grad_x : NULL, grad_weight,
                                biased ? grad_bias : NULL);
    cluster = ids(T, 0, E - 1);
    float *spread = room(E * D * 4), *number = room(E * 4), *found = room(E * D * 4);
    const int alone = round % 7 == 3; /* the scale is wanted, and nothing that it is computed from */
    bad |= acmoe_statistics(x, cluster, T, D, E, round % 3, alone ? NULL : spread,
                            alone ? NULL : number, scaled ? floats(E * D) : NULL,
                            scaled ? sums : NULL, 2, biased ? found : NULL, 1e-3, 0.0, 2);
    const int64_t B = draw(1, 3), L = draw(0, 20), M = B * E; /* sequences, their tokens, their clusters */
    int64_t *own = ids(B * L, -1, E - 1);
    uint8_t *mask = room(B * L);
    for (int64_t t = 0; t < B * L; t++) mask[t] = (uint8_t)draw(0, 1);
    float *seen = room(M * 4), *scales = room(B * L * D * 4), *tokens = floats(B * L * D);
    for (int64_t i = 0; i < M; i++) seen[i] = (float)draw(0, 3);
    bad |= acmoe_prefix_scale(tokens, own, scaled ? mask : NULL, B, L, D, E, round % 3, seen,
                              floats(M * D), spreads(M * D), scale, seen, 16.0, 1e-3, 0.0, 2, scales,
                              room(M * 4), room(M * D * 4), room(M * D * 4));
    double *spread_of = room(E * D * 8), *lambda = room(E * 8);
    for (int64_t i = 0; i < E * D; i++) spread_of[i] = scale[i];
    for (int64_t e = 0; e < E; e++) lambda[e] = (double)draw(1, 1000) / 100.0;
    bad |= acmoe_theorem_weights(spread_of, lambda, E, D, 24, 1e140, room(E * D * 8));
    int64_t *permutation = room(N * 8), *inverse = room(N * 8), *ends = room(E * 8);
    bad |= acmoe_sort_rows(choice, N, E, permutation, inverse, ends, room(N * 8));
    float *hidden = room(N * H * 4), *rows = room(N * D * 4), *out = room(T * D * 4);
    bad |= acmoe_rows_times_weights(x, permutation, K, ends, floats(E * H * D),
                                    biased ? floats(E * H) : NULL, N, E, D, H, scaled, hidden);
    bad |= acmoe_rows_times_weights(hidden, NULL, K, ends, floats(E * D * H), NULL, N, E, H, D, 0,
                                    rows);
    bad |= acmoe_combine(rows, inverse, gate, T, K, D, out);
    float *pairs = floats(N * 2 * H);
    bad |= acmoe_swiglu(pairs, N, H, hidden);
    bad |= acmoe_swiglu_backward(hidden, pairs, N, H, room(N * 2 * H * 4));
    float *grad_rows = room(N * D * 4), *grad_hidden = room(N * H * 4);
    bad |= acmoe_combine_backward(x, rows, inverse, gate, T, K, D, grad_rows,
                                  scaled ? room(N * 4) : NULL);
    bad |= acmoe_outer_of_rows(grad_rows, hidden, ends, N, E, D, H, scaled ? room(E * D * H * 4) : NULL,
                               biased ? room(E * D * 4) : NULL);
    bad |= acmoe_rows_through_weights(grad_rows, ends, floats(E * D * H), selected ? hidden : NULL, N, E,
                                      D, H, grad_hidden);
    bad |= acmoe_rows_through_weights(grad_hidden, ends, floats(E * H * D), NULL, N, E, H, D, grad_rows);
    /* Ids that do not exist are refused before they are used. */
    cluster[T - 1] = E;
    bad |= !acmoe_statistics(x, cluster, T, D, E, 0, spread, number, NULL, NULL, 2, NULL, 0, 0, 2);
    bad |= !acmoe_route(x, scale, cluster, weight, NULL, T, D, E, E, K, 1, 1, 1, affinity, choice, gate,
                        first, NULL, NULL, NULL);
    if (L > 0) {
        own[0] = E;
        bad |= !acmoe_prefix_scale(tokens, own, NULL, B, L, D, E, 0, seen, tokens, tokens, scale, seen, 16.0,
                                   1e-3, 0.0, 2, scales, seen, tokens, tokens);
    }
    inverse[0] = N;
    bad |= !acmoe_combine(rows, inverse, gate, T, K, D, out);
    bad |= !acmoe_combine_backward(x, rows, inverse, gate, T, K, D, grad_rows, NULL);
    permutation[0] = -1;
    bad |= !acmoe_rows_times_weights(x, permutation, K, ends, x, NULL, N, E, D, H, 0, hidden);
    ends[E - 1] += 1;
    bad |= !acmoe_rows_times_weights(x, NULL, K, ends, x, NULL, N, E, D, H, 0, hidden);
    bad |= !acmoe_rows_through_weights(rows, ends, x, NULL, N, E, D, H, hidden);
    bad |= !acmoe_outer_of_rows(rows, hidden, ends, N, E, D, H, x, NULL);
    choice[N - 1] = -1;
    bad |= !acmoe_sort_rows(choice, N, E, permutation, inverse, ends, inverse);
    x[T * D - 1] = NAN;
    bad |= !acmoe_route(x, NULL, NULL, weight, NULL, T, D, E, E, K, 1, 1, 1, affinity, choice, gate,
                        first, NULL, NULL, NULL);
    while (used > 0) free(memory[--used]);
    return bad;
}

int main(void) {
    int bad = 0;
    for (int round = 0; round < 500; round++) bad |= call(round);
    puts(bad ? "a call was not served, or served what it must refuse" : "all calls are right");
    return bad;
}
