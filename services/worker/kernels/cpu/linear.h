// Matrices packed in panels of 16 outputs, and the product of activation rows with one panel.
// Each (row, output) is one chain of operations in ascending input order, so the number of rows beside it cannot
// change a bit. Integer dot products are exact; every group of 32 inputs is scaled and added in float, in order.
#pragma once
#include "simd.h"

namespace mr {

constexpr int GROUP = 32;
enum Format : int32_t { F32 = 0, Q4 = 1, Q8 = 2 };
constexpr size_t Q4_BYTES = 256 + 32 + 32;  // nibbles, scales, minima of one group of one panel
constexpr size_t Q8_BYTES = 512 + 32;       // bytes offset by 128, scales

constexpr int KEPT = 8;  // inputs of a quantised product that stay float

struct Linear {
    int32_t format, outputs, inputs, panels;
    const uint8_t* data;
    const float* kept;  // (panels, KEPT, 16) weights of the kept inputs; null until calibrated
};

// Activation rows: floats for F32, else int8 by groups with scale, scale × sum, and -128 × sum. A few inputs are
// many times larger than the rest, in every row; in eight bits they would cost their whole group its precision, so
// they are taken out and multiplied in float.
struct Rows {
    int inputs;
    float* values;
    int8_t* bytes;
    float* scales;
    float* scaled_sums;
    int32_t* offsets;
    float* kept;              // (rows, KEPT)
    const int32_t* channels;  // which inputs are kept, ascending; null for none
    float* magnitudes;        // sums of |x| an input while calibrating, else null
};

static inline size_t panel_bytes(const Linear& m) {
    size_t groups = (size_t)m.inputs / GROUP;
    if (m.format == F32) return (size_t)m.inputs * LANES * sizeof(float);
    return groups * (m.format == Q4 ? Q4_BYTES : Q8_BYTES);
}

static inline void quantise_group(const float* x, const Rows& rows, size_t row, int group) {
    alignas(64) float rest[GROUP];
    if (rows.magnitudes)
        for (int i = 0; i < GROUP; i++) rows.magnitudes[group * GROUP + i] += std::fabs(x[i]);
    if (rows.channels) {
        memcpy(rest, x, sizeof rest);
        for (int k = 0; k < KEPT; k++) {
            int at = rows.channels[k] - group * GROUP;
            if (at < 0 || at >= GROUP) continue;
            rows.kept[row * KEPT + k] = x[at];
            rest[at] = 0.0f;
        }
        x = rest;
    }
    size_t at = row * rows.inputs + (size_t)group * GROUP, slot = row * (rows.inputs / GROUP) + group;
    V low = load(x), high = load(x + LANES);
    float top = max_lanes(vmax(vabs(low), vabs(high)));
    float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    store_int8(rows.bytes + at, mul(low, splat(inverse)));
    store_int8(rows.bytes + at + LANES, mul(high, splat(inverse)));
    int sum = 0;
    for (int i = 0; i < GROUP; i++) sum += rows.bytes[at + i];
    float scale = top / 127.0f;
    rows.scales[slot] = scale;
    rows.scaled_sums[slot] = scale * (float)sum;
    rows.offsets[slot] = -128 * sum;
}

template <int MR>
static void tile_f32(const uint8_t* data, const Rows& rows, size_t row, float* out) {
    const float* w = (const float*)data;
    const float* x = rows.values + row * rows.inputs;
    V sums[MR];
    for (int r = 0; r < MR; r++) sums[r] = splat(0.0f);
    for (int k = 0; k < rows.inputs; k++) {
        V column = load(w + (size_t)k * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) sums[r] = fma(splat(x[(size_t)r * rows.inputs + k]), column, sums[r]);
    }
    for (int r = 0; r < MR; r++) store(out + r * LANES, sums[r]);
}

#if defined(__AVX512VNNI__)
static inline __m512i quad(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
template <int MR, bool FOUR>
static void tile_int(const uint8_t* data, const Rows& rows, size_t row, float* out) {
    const int groups = rows.inputs / GROUP;
    const __m512i nibble = _mm512_set1_epi8(15);
    const int8_t* bytes = rows.bytes + row * rows.inputs;
    V sums[MR];
    for (int r = 0; r < MR; r++) sums[r] = load(out + r * LANES);
    for (int g = 0; g < groups; g++, data += FOUR ? Q4_BYTES : Q8_BYTES) {
        __m512i w[8];
        for (int j = 0; j < (FOUR ? 4 : 8); j++) {
            __m512i packed = _mm512_loadu_si512(data + j * 64);
            w[j] = FOUR ? _mm512_and_si512(packed, nibble) : packed;
            if (FOUR) w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
        }
        V scale = load_half((const uint16_t*)(data + (FOUR ? 256 : 512)));
        V minimum = FOUR ? load_half((const uint16_t*)(data + 288)) : scale;
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const int8_t* a = bytes + (size_t)r * rows.inputs + g * GROUP;
            size_t slot = (row + r) * groups + g;
            __m512i dot = FOUR ? _mm512_setzero_si512() : _mm512_set1_epi32(rows.offsets[slot]);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) dot = _mm512_dpbusd_epi32(dot, w[j], quad(a + 4 * j));
            sums[r] = fma(V{_mm512_cvtepi32_ps(dot)}, mul(scale, splat(rows.scales[slot])), sums[r]);
            if (FOUR) sums[r] = fma(minimum, splat(rows.scaled_sums[slot]), sums[r]);
        }
    }
    for (int r = 0; r < MR; r++) store(out + r * LANES, sums[r]);
}
#else
static inline __m256i quad(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
static inline __m256i pair_dot(__m256i sum, __m256i weights, const int8_t* p) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, quad(p)));
}
// Eight outputs of the panel. Nibbles keep the 16-bit sums of a whole group below 8 × 2 × 15 × 127 = 30,480.
template <int MR, bool FOUR>
static void half_int(const uint8_t* data, const Rows& rows, size_t row, float* out, int half) {
    const int groups = rows.inputs / GROUP;
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
    const int8_t* bytes = rows.bytes + row * rows.inputs;
    __m256 sums[MR];
    for (int r = 0; r < MR; r++) sums[r] = _mm256_loadu_ps(out + r * LANES + half * 8);
    for (int g = 0; g < groups; g++, data += FOUR ? Q4_BYTES : Q8_BYTES) {
        __m256i low16[MR], high16[MR];
        for (int r = 0; r < MR; r++) low16[r] = high16[r] = _mm256_setzero_si256();
        for (int j = 0; j < (FOUR ? 4 : 8); j++) {
            __m256i packed = _mm256_loadu_si256((const __m256i*)(data + j * 64 + half * 32));
            __m256i low = _mm256_and_si256(packed, nibble);
            __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                const int8_t* a = bytes + (size_t)r * rows.inputs + g * GROUP + 4 * j;
                low16[r] = pair_dot(low16[r], low, a);
                if (FOUR)
                    low16[r] = pair_dot(low16[r], high, a + 16);
                else
                    high16[r] = pair_dot(high16[r], high, a);
            }
        }
        const uint16_t* halves = (const uint16_t*)(data + (FOUR ? 256 : 512)) + half * 8;
        __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves));
        __m256 minimum = FOUR ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(halves + 16))) : scale;
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
            size_t slot = (row + r) * groups + g;
            __m256i dot = _mm256_madd_epi16(low16[r], ones);
            if (!FOUR) {
                dot = _mm256_add_epi32(dot, _mm256_madd_epi16(high16[r], sixteens));
                dot = _mm256_add_epi32(dot, _mm256_set1_epi32(rows.offsets[slot]));
            }
            __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(rows.scales[slot]));
            sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, sums[r]);
            if (FOUR) sums[r] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(rows.scaled_sums[slot]), sums[r]);
        }
    }
    for (int r = 0; r < MR; r++) _mm256_storeu_ps(out + r * LANES + half * 8, sums[r]);
}
template <int MR, bool FOUR>
static void tile_int(const uint8_t* data, const Rows& rows, size_t row, float* out) {
    half_int<MR, FOUR>(data, rows, row, out, 0);
    half_int<MR, FOUR>(data, rows, row, out, 1);
}
#endif

// The kept inputs' part, on which the integer tiles build.
template <int MR>
static void tile_kept(const Linear& m, int panel, const Rows& rows, size_t row, float* out) {
    for (int r = 0; r < MR; r++) {
        V sum = splat(0.0f);
        if (rows.channels)
            for (int k = 0; k < KEPT; k++)
                sum = fma(splat(rows.kept[(row + r) * KEPT + k]), load(m.kept + ((size_t)panel * KEPT + k) * LANES), sum);
        store(out + r * LANES, sum);
    }
}

template <int MR>
static void tile_any(const Linear& m, int panel, const Rows& rows, size_t row, float* out) {
    const uint8_t* data = m.data + panel * panel_bytes(m);
    if (m.format == F32) return tile_f32<MR>(data, rows, row, out);
    tile_kept<MR>(m, panel, rows, row, out);
    if (m.format == Q4)
        tile_int<MR, true>(data, rows, row, out);
    else
        tile_int<MR, false>(data, rows, row, out);
}

#if defined(__AVX512F__)
constexpr int TILE = 8;
#else
constexpr int TILE = 4;
#endif

// One weight of a quantised panel.
static inline float weight_at(const Linear& m, int panel, int lane, int input) {
    const int g = input / GROUP, i = input % GROUP;
    const bool four = m.format == Q4;
    const uint8_t* group = m.data + panel * panel_bytes(m) + (size_t)g * (four ? Q4_BYTES : Q8_BYTES);
    const uint16_t* halves = (const uint16_t*)(group + (four ? 256 : 512));
    const float scale = _cvtsh_ss(halves[lane]);
    if (!four) return scale * (float)((int)group[i / 4 * 64 + lane * 4 + i % 4] - 128);
    const uint8_t pair = group[i % 16 / 4 * 64 + lane * 4 + i % 4];
    return scale * (float)(i < 16 ? pair & 15 : pair >> 4) + _cvtsh_ss(halves[LANES + lane]);
}

// Product of `count` <= TILE rows with one panel, into out (count, 16).
static inline void tile(const Linear& m, int panel, const Rows& rows, size_t row, int count, float* out) {
    if (count == TILE) return tile_any<TILE>(m, panel, rows, row, out);
    for (; count >= 2; count -= 2, row += 2, out += 2 * LANES) tile_any<2>(m, panel, rows, row, out);
    if (count) tile_any<1>(m, panel, rows, row, out);
}

}  // namespace mr
