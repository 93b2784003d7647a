// Vectors of the instruction set that the translation unit is compiled for.
//
// Everything sits in an unnamed namespace and nothing of std:: is used: a linker must have nothing to merge
// between units built for different instruction sets. Compiled with -ffp-contract=off, so that a product
// and a sum are fused only where `fused` says so, in every place alike.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
// Before version 13, gcc warns of the undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRows = 4;   // rows by keys of a block of dot products are as many as lanes
constexpr int kWide = 4;   // vectors of a block of weighted sums: kRows * kWide are in registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRows = 4;
constexpr int kWide = 2;
#else
constexpr int kLanes = 4;
constexpr int kRows = 2;
constexpr int kWide = 4;
#endif
constexpr int kKeys = kLanes / kRows;

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t bfloat16;

inline Vector load(const float *from) {
    Vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float *to, Vector v) { memcpy(to, &v, sizeof v); }

inline Vector all(float x) { return x - Vector{}; }  // less 0, which changes no x, not even -0

inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline void from_float(float x, float &to) { to = x; }

// To the nearest, ties to even; a NaN stays one.
inline void from_float(float x, bfloat16 &to) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to = x == x ? (bfloat16)rounded : (bfloat16)0x7fc0;
}

// Values come into registers in steps: of kLanes floats in their order, or of 2 * kLanes bfloat16, first
// those of even index, then those of odd index, which needs no shuffle. Queries, packed keys and sums are
// kept in that order.
template <typename T>
struct Step;

template <>
struct Step<float> {
    static constexpr int vectors = 1;
    static inline void load_to(const float *from, Vector *to) { to[0] = load(from); }
};

template <>
struct Step<bfloat16> {
    static constexpr int vectors = 2;
    static inline void load_to(const bfloat16 *from, Vector *to) {
        Ints pairs;
        memcpy(&pairs, from, sizeof pairs);
        to[0] = (Vector)(pairs << 16);
        to[1] = (Vector)(pairs & (int32_t)0xffff0000);
    }
};

// `dim` values rounded up to whole steps.
template <typename T>
constexpr int64_t padded(int64_t dim) {
    constexpr int64_t step = Step<T>::vectors * kLanes;
    return (dim + step - 1) / step * step;
}

// [dim] of any type to floats in the order of Step<T>, zeros after them.
template <typename T, typename From>
inline void to_lanes(const From *from, int64_t dim, float scale, float *to) {
    constexpr int n = Step<T>::vectors;
    const int64_t whole = dim / (n * kLanes) * (n * kLanes);
    for (int64_t at = 0; at < whole; at += n * kLanes)
        for (int v = 0; v < n; ++v)
            for (int i = 0; i < kLanes; ++i) to[at + v * kLanes + i] = to_float(from[at + i * n + v]) * scale;
    if (whole == dim) return;
    for (int i = 0; i < n * kLanes; ++i) to[whole + i] = 0;
    for (int64_t i = 0; i < dim - whole; ++i)
        to[whole + i % n * kLanes + i / n] = to_float(from[whole + i]) * scale;
}

// The way back.
template <typename T, typename To>
inline void from_lanes(const float *from, int64_t dim, float scale, To *to) {
    constexpr int n = Step<T>::vectors;
    const int64_t whole = dim / (n * kLanes) * (n * kLanes);
    for (int64_t at = 0; at < whole; at += n * kLanes)
        for (int i = 0; i < kLanes; ++i)
            for (int v = 0; v < n; ++v) from_float(from[at + v * kLanes + i] * scale, to[at + i * n + v]);
    for (int64_t i = 0; i < dim - whole; ++i)
        from_float(from[whole + i % n * kLanes + i / n] * scale, to[whole + i]);
}

// kLanes vectors to the vector of their sums, each summed in the same order.
inline Vector sums(const Vector *v) {
#if defined(__AVX512F__)
    __m512 two[8], four[4], eight[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        two[i] = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]),
                               _mm512_unpackhi_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
        eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));
    return (Vector)_mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),
                                 _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
#elif defined(__AVX2__)
    __m256 two[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) two[i] = _mm256_hadd_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) four[i] = _mm256_hadd_ps(two[2 * i], two[2 * i + 1]);
    return (Vector)_mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                                 _mm256_permute2f128_ps(four[0], four[1], 0x31));
#else
    const Ints low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
    const Vector a = __builtin_shuffle(v[0], v[1], low) + __builtin_shuffle(v[0], v[1], high);
    const Vector b = __builtin_shuffle(v[2], v[3], low) + __builtin_shuffle(v[2], v[3], high);
    const Ints first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
    return __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, second);
#endif
}

// The larger; of a NaN and a number, `b`.
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// Lane i of the result is lane i ^ Distance.
template <int Distance>
inline Vector swapped(Vector v) {
    Ints from;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) from[i] = i ^ Distance;
    return __builtin_shuffle(v, from);
}

inline float largest_lane(Vector v) {
#if defined(__AVX512F__)
    v = larger(v, swapped<8>(v));
#endif
#if defined(__AVX2__)
    v = larger(v, swapped<4>(v));
#endif
    v = larger(v, swapped<2>(v));
    return larger(v, swapped<1>(v))[0];
}

inline float sum_of_lanes(Vector v) {
#if defined(__AVX512F__)
    v += swapped<8>(v);
#endif
#if defined(__AVX2__)
    v += swapped<4>(v);
#endif
    v += swapped<2>(v);
    return v[0] + v[1];
}

// e^x for x <= 0, about one unit in the last place; 0 below -87.3, a NaN for a NaN.
inline Vector exponential(Vector x) {
    const Vector magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector n = fused(x, all(1.44269504f), magic) - magic;
    Vector r = fused(n, all(-0.693359375f), x);  // ln 2 in two parts
    r = fused(n, all(2.12194440e-4f), r);
    Vector p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p, r * r, r + all(1.0f));
    const Vector low = all(-87.3f);
    const Vector exponent = x < low ? Vector{} : n;
    const Ints power = (__builtin_convertvector(exponent, Ints) + 127) << 23;
    return x < low ? Vector{} : p * (Vector)power;
}

inline float exponential(float x) { return exponential(all(x))[0]; }

}  // namespace
