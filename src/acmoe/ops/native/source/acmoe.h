/* Kernels of small calls on a CPU, in C11. Each runs in the calling thread.

   ops/native/library.py has their signatures and compiles them. A function returns SERVED, or
   another number before it has written anything that the caller reads; the caller then runs the
   definition in PyTorch.

   T tokens, D features, E experts, K experts per token, C clusters, N = T * K routed rows. */

#ifndef ACMOE_H
#define ACMOE_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SERVED = 0, NOT_SERVED = 1, NO_MEMORY = 2 };

/* A sum over floats in the lanes of vector registers. It needs -fopenmp-simd, and no threads. */
#define PRAGMA(text) _Pragma(#text)
#define SUM_OVER(...) PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define EACH PRAGMA(omp simd)
/* A loop over vectors that should stay in registers: copied for each step, which GCC leaves to us. */
#define UNROLLED PRAGMA(GCC unroll 8)

/* A function that the compiler makes anew for each call, for the constants among its arguments. */
#define INLINE static inline __attribute__((always_inline))

/* Eight floats in one or two vector registers; `loose` ones may begin anywhere. */
enum { LANES = 8 };
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t marks __attribute__((vector_size(4 * LANES)));

/* Return the first address from here on that is aligned for vectors. */
static inline lanes *aligned(void *memory) {
    return (lanes *)(((uintptr_t)memory + sizeof(lanes) - 1) / sizeof(lanes) * sizeof(lanes));
}

/* Return `yes` in the lanes whose mark is -1, and `no` where it is 0. */
static inline lanes either(marks mark, lanes yes, lanes no) {
    return (lanes)((mark & (marks)yes) | (~mark & (marks)no));
}

/* Return the first `number` of eight floats, and zeros. */
static inline lanes load(const float *from, int64_t number) {
    if (number >= LANES) return *(const loose *)from;
    lanes found = {0};
    for (int64_t i = 0; i < number; i++) found[i] = from[i];
    return found;
}

static inline void store(float *to, lanes value, int64_t number) {
    if (number >= LANES) {
        *(loose *)to = value;
        return;
    }
    for (int64_t i = 0; i < number; i++) to[i] = value[i];
}

/* Return a number of floats, raised to a multiple of eight. */
static inline int64_t padded(int64_t number) { return (number + LANES - 1) / LANES * LANES; }

/* The fourth root of float32's range, as `ops/bounded.py` has it. */
#define BOUND 4294967296.0f

/* Return exp(v) of v <= 0, up to 2 units in the last place, without a branch: the compiler makes
   vectors of it. Below -87 the result is 0. exp(v) = 2^n exp(r), r in [-ln 2 / 2, ln 2 / 2]. */
static inline float exp_of(float v) {
    const float low = v < -87.0f ? -87.0f : v;
    const float n = floorf(low * 1.44269504f + 0.5f);
    float r = low - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t bits; float value; } power = {(uint32_t)((int32_t)n + 127) << 23};
    return v < -87.0f ? 0.0f : p * power.value;
}

/* Return the number of ids outside of [low, high). */
static inline int64_t outside(const int64_t *ids, int64_t number, int64_t low, int64_t high) {
    int64_t bad = 0;
    for (int64_t i = 0; i < number; i++) bad += ids[i] < low || ids[i] >= high;
    return bad;
}

#endif
