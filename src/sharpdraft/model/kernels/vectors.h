// Vectors, GCC's and clang's own, so that one source serves every instruction set; it is compiled
// for the machine at hand, as one unit. LANES, the floats of a vector, 16 or 8, is the build's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int W = LANES;
#if LANES == 16
constexpr int ACCUMULATORS = 24;
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
constexpr int ACCUMULATORS = 12;
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif
#define UNROLL _Pragma("GCC unroll 64")

typedef float Vec __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t Int __attribute__((vector_size(W * 4), aligned(4)));
typedef uint16_t Half __attribute__((vector_size(W * 2), aligned(2)));

constexpr int LINE = 16;  // floats that memory hands over at once

// Call `done` with `count`, which is 1 to MOST, as a constant.
template <int MOST, typename F> inline void with_constant(int64_t count, F done) {
    if (count == MOST) done(std::integral_constant<int, MOST>());
    else if constexpr (MOST > 1) with_constant<MOST - 1>(count, done);
}

inline int64_t threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

inline Vec load(const float *at) { return *reinterpret_cast<const Vec *>(at); }
inline Vec load(const uint16_t *at) {  // bfloat16 is the upper half of a float
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const Half *>(at), Int) << 16);
}
inline void store(float *at, Vec value) { *reinterpret_cast<Vec *>(at) = value; }
inline Vec all(float value) { return Vec{} + value; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

#if LANES == 16
#define SWAP_8(x) \
    __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define SWAP_4(x) __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3)
#define SWAP_2(x) __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1)
#else
#define SWAP_4(x) __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3)
#define SWAP_2(x) __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1)
#endif

// Lanes folded onto each other by halves.
template <typename F> inline float fold(Vec value, F both) {
#if LANES == 16
    value = both(value, SWAP_8(value));
#endif
    value = both(value, SWAP_4(value));
    value = both(value, SWAP_2(value));
    Vec one = both(value, Vec{} + value[1]);
    return one[0];
}

inline float sum(Vec value) { return fold(value, [](Vec a, Vec b) { return a + b; }); }
inline float highest(Vec value) { return fold(value, larger); }

// e^x for x <= 0 to about one unit in the last place: 2^n e^r with |r| <= ln2 / 2 (Cephes'
// polynomial).
inline Vec exponential(Vec low) {
    Vec x = larger(low, all(-87.0f));
    const Vec magic = all(12582912.0f);  // adding it rounds to an integer
    Vec shifted = x * 1.44269504088896341f + magic;
    Vec n = shifted - magic;
    Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Int power = (__builtin_convertvector(n, Int) + 127) << 23;
    return low < -87.0f ? Vec{} : p * (Vec)power;
}

// W rows of W floats, rows becoming columns: W.log2() rounds of interleaving halves.
inline void transpose(const float *from, int64_t rows, int64_t stride, float *to,
                      int64_t to_stride) {
    Vec a[W], b[W];
    UNROLL for (int i = 0; i < W; i++) a[i] = i < rows ? load(from + i * stride) : Vec{};
    UNROLL for (int round = 1; round < W; round *= 2) {
        UNROLL for (int i = 0; i < W / 2; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + W / 2], LOW);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + W / 2], HIGH);
        }
        UNROLL for (int i = 0; i < W; i++) a[i] = b[i];
    }
    UNROLL for (int i = 0; i < W; i++) store(to + i * to_stride, a[i]);
}

}  // namespace
