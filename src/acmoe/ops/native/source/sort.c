/* Routed rows sorted by expert, by counting. ops/sort/reference.py defines the results. */

#include "acmoe.h"

/* NOT_SERVED: an id is not in [0, E]. */
int acmoe_sort_rows(const int64_t *ids, int64_t N, int64_t E, int64_t *permutation, int64_t *inverse,
                    int64_t *offsets, int64_t *expert) {
    if (outside(ids, N, 0, E + 1)) return NOT_SERVED;
    int64_t *next = calloc((size_t)(E + 1), sizeof(int64_t));
    if (next == NULL) return NO_MEMORY;
    for (int64_t i = 0; i < N; i++) next[ids[i]] += 1;
    for (int64_t e = 0, end = 0; e <= E; e++) {
        const int64_t begin = end;
        end += next[e];
        next[e] = begin;
        if (e < E) offsets[e] = end;
    }
    for (int64_t i = 0; i < N; i++) {
        const int64_t place = next[ids[i]]++;
        permutation[place] = i;
        inverse[i] = place;
        expert[place] = ids[i];
    }
    free(next);
    return SERVED;
}
