// Sixteen floats as one value, on AVX2 (two registers) or AVX-512 (one), with the same operations in the same order
// per lane: results are the same bits on both. Nothing here reassociates; contraction is off, fused adds are explicit.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mr {

constexpr int LANES = 16;

#if defined(__AVX512F__)
struct V {
    __m512 v;
};
static inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, V x) { _mm512_storeu_ps(p, x.v); }
static inline V splat(float x) { return {_mm512_set1_ps(x)}; }
static inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline V vmax(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline V vmin(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline V vabs(V a) { return {_mm512_abs_ps(a.v)}; }
static inline V load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline void store_half(uint16_t* p, V x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline V round_even(V a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline V power_of_two(V n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
static inline void store_int8(int8_t* p, V x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v))); }
static inline float max_lanes(V x) { return _mm512_reduce_max_ps(x.v); }
#else
struct V {
    __m256 a, b;
};
static inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V add(V a, V b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
static inline V sub(V a, V b) { return {_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
static inline V mul(V a, V b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
static inline V div(V a, V b) { return {_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
static inline V vmax(V a, V b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
static inline V vmin(V a, V b) { return {_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
static inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
static inline V vabs(V a) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.a, mask), _mm256_and_ps(a.b, mask)};
}
static inline V load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline void store_half(uint16_t* p, V x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline __m256 round_even(__m256 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V round_even(V a) { return {round_even(a.a), round_even(a.b)}; }
static inline __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline V power_of_two(V n) { return {power_of_two(n.a), power_of_two(n.b)}; }
static inline float max_lanes(V x) {
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline void store_int8(int8_t* p, V x) {
    __m256i low = _mm256_cvtps_epi32(x.a), high = _mm256_cvtps_epi32(x.b);
    __m128i first = _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    __m128i second = _mm_packs_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(first, second));
}
#endif

// Lanes folded in halves: 16 → 8 → 4 → 2 → 1, the same on every machine.
static inline float sum_lanes(V x) {
    alignas(64) float t[LANES];
    store(t, x);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) t[i] += t[i + width];
    return t[0];
}
// e^x within 2 ulp (Cephes' polynomial); below -87 it gives e^-87, which callers treat as zero or mask.
static inline V vexp(V x) {
    x = vmin(vmax(x, splat(-87.0f)), splat(88.0f));
    V n = round_even(mul(x, splat(1.44269504088896341f)));
    V r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    V p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, splat(1.0f)));
    return mul(p, power_of_two(n));
}
static inline float exp1(float x) {
    alignas(64) float t[LANES];
    store(t, vexp(splat(x)));
    return t[0];
}
static inline V silu(V x) { return div(x, add(splat(1.0f), vexp(sub(splat(0.0f), x)))); }

}  // namespace mr
