// Matrices packed in panels of 16 outputs, and the product of activation rows with one panel.
// Each (row, output) is one chain of operations in ascending input order, so the number of rows beside it cannot
// change a bit. Integer dot products are exact; every group of 32 inputs is scaled and added in float, in order.
#pragma once
#include <type_traits>

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

// Groups of one panel as a tile reads them: four weights of each of 16 outputs a quad, eight quads a group.
// `Packed` takes them from where they are stored; `Unpacked` holds a stretch of them ready for many rows.
template <bool FOUR>
struct Packed {
    static constexpr size_t BYTES = FOUR ? Q4_BYTES : Q8_BYTES;
    const uint8_t* data;
    const uint8_t* quads(int group) const { return data + group * BYTES; }
    const uint16_t* halves(int group) const { return (const uint16_t*)(quads(group) + (FOUR ? 256 : 512)); }
    V scale(int group) const { return load_half(halves(group)); }
    V minimum(int group) const { return load_half(halves(group) + LANES); }
    // A hint that is harmless beyond the end: what comes next arrives while this stretch is multiplied.
    void fetch(int group) const {
        for (size_t at = 0; at < BYTES; at += 64) _mm_prefetch((const char*)quads(group) + at, _MM_HINT_T0);
    }
#if defined(__AVX512VNNI__)
    __m512i quad(int group, int j) const {
        if (!FOUR) return _mm512_loadu_si512(quads(group) + j * 64);
        __m512i pair = _mm512_loadu_si512(quads(group) + j % 4 * 64);
        return _mm512_and_si512(j < 4 ? pair : _mm512_srli_epi16(pair, 4), _mm512_set1_epi8(15));
    }
#else
    // Nibbles of half a quad: of the four-bit quads j and j + 4, or of the eight-bit quad j.
    __m256i low(int group, int j, int half) const {
        __m256i both = _mm256_loadu_si256((const __m256i*)(quads(group) + j * 64 + half * 32));
        return _mm256_and_si256(both, _mm256_set1_epi8(15));
    }
    __m256i high(int group, int j, int half) const {
        __m256i both = _mm256_loadu_si256((const __m256i*)(quads(group) + j * 64 + half * 32));
        return _mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
    }
#endif
};

// Groups ahead of the multiplication when packed weights feed it: the hardware's own fetching ends with each page.
constexpr int AHEAD = 16;
template <typename Source>
constexpr bool is_packed = false;
template <bool FOUR>
constexpr bool is_packed<Packed<FOUR>> = true;

constexpr int STRETCH = 18;  // groups unpacked at once: with the rows of a tile they fit the first-level cache

#if defined(__AVX512VNNI__)
static inline __m512i quad_of(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
template <bool FOUR>
struct Unpacked {
    alignas(64) uint8_t bytes[STRETCH * 8 * 64];
    alignas(64) float scales[STRETCH * LANES], minima[STRETCH * LANES];
    V scale(int group) const { return load(scales + group * LANES); }
    V minimum(int group) const { return load(minima + group * LANES); }
    __m512i quad(int group, int j) const { return _mm512_load_si512(bytes + (group * 8 + j) * 64); }
    void fill(const Packed<FOUR>& from, int groups) {
        for (int g = 0; g < groups; g++) {
            from.fetch(g + STRETCH);
            for (int j = 0; j < 8; j++) _mm512_store_si512(bytes + (g * 8 + j) * 64, from.quad(g, j));
            store(scales + g * LANES, from.scale(g));
            if (FOUR) store(minima + g * LANES, from.minimum(g));
        }
    }
};
// Adds the products of MR rows with `groups` groups, from the row's group `first` on, to out (MR, 16).
template <int MR, bool FOUR, typename Source>
static void tile_int(const Source& source, int first, int groups, const Rows& rows, size_t row, float* out) {
    const int all = rows.inputs / GROUP;
    V sums[MR];
    for (int r = 0; r < MR; r++) sums[r] = load(out + r * LANES);
    for (int g = 0; g < groups; g++) {
        if constexpr (is_packed<Source>) source.fetch(g + AHEAD);
        __m512i w[8];
        for (int j = 0; j < 8; j++) w[j] = source.quad(g, j);
        V scale = source.scale(g), minimum = FOUR ? source.minimum(g) : scale;
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const int8_t* a = rows.bytes + (row + r) * rows.inputs + (first + g) * GROUP;
            size_t slot = (row + r) * all + first + g;
            __m512i dot = FOUR ? _mm512_setzero_si512() : _mm512_set1_epi32(rows.offsets[slot]);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) dot = _mm512_dpbusd_epi32(dot, w[j], quad_of(a + 4 * j));
            sums[r] = fma(V{_mm512_cvtepi32_ps(dot)}, mul(scale, splat(rows.scales[slot])), sums[r]);
            if (FOUR) sums[r] = fma(minimum, splat(rows.scaled_sums[slot]), sums[r]);
        }
    }
    for (int r = 0; r < MR; r++) store(out + r * LANES, sums[r]);
}
#else
static inline __m256i quad_of(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
template <bool FOUR>
struct Unpacked {
    static constexpr int PAIRS = FOUR ? 4 : 8;
    alignas(64) uint8_t lows[STRETCH * PAIRS * 64], highs[STRETCH * PAIRS * 64];
    alignas(64) float scales[STRETCH * LANES], minima[STRETCH * LANES];
    V scale(int group) const { return load(scales + group * LANES); }
    V minimum(int group) const { return load(minima + group * LANES); }
    static size_t at(int group, int j, int half) { return (size_t)(group * PAIRS + j) * 64 + half * 32; }
    __m256i low(int group, int j, int half) const {
        return _mm256_load_si256((const __m256i*)(lows + at(group, j, half)));
    }
    __m256i high(int group, int j, int half) const {
        return _mm256_load_si256((const __m256i*)(highs + at(group, j, half)));
    }
    void fill(const Packed<FOUR>& from, int groups) {
        for (int g = 0; g < groups; g++) {
            from.fetch(g + STRETCH);
            for (int j = 0; j < PAIRS; j++)
                for (int half = 0; half < 2; half++) {
                    _mm256_store_si256((__m256i*)(lows + at(g, j, half)), from.low(g, j, half));
                    _mm256_store_si256((__m256i*)(highs + at(g, j, half)), from.high(g, j, half));
                }
            store(scales + g * LANES, from.scale(g));
            if (FOUR) store(minima + g * LANES, from.minimum(g));
        }
    }
};
// Written out so that few values live at once: from intrinsics the compiler spills sums to memory.
static inline void add_products(__m256i& sum, __m256i w, __m256i x) {
    __m256i product;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(x));
}
// Adds the products of MR rows with `groups` groups, from the row's group `first` on, to out (MR, 16). Nibbles keep the
// 16-bit sums of a whole group below 8 × 2 × 15 × 127 = 30,480.
template <int MR, bool FOUR, typename Source>
static void tile_int(const Source& source, int first, int groups, const Rows& rows, size_t row, float* out) {
    constexpr int PAIRS = FOUR ? 4 : 8, HALVES = FOUR || MR <= 2 ? 2 : 1;  // so many outputs at once as registers hold
    const int all = rows.inputs / GROUP;
    const __m256i ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
    for (int start = 0; start < 2; start += HALVES)
        for (int g = 0; g < groups; g++) {
            if constexpr (is_packed<Source>)
                if (start == 0) source.fetch(g + AHEAD);
            const int8_t* a = rows.bytes + row * rows.inputs + (size_t)(first + g) * GROUP;
            __m256i sums[MR][2][HALVES];  // Nibbles share one sum; bytes keep one for each of theirs.
            for (int r = 0; r < MR; r++)
                for (int h = 0; h < HALVES; h++) sums[r][0][h] = sums[r][1][h] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int j = 0; j < PAIRS; j++)
#pragma GCC unroll 2
                for (int part = 0; part < 2; part++) {
                    __m256i w[HALVES];
#pragma GCC unroll 2
                    for (int h = 0; h < HALVES; h++)
                        w[h] = part ? source.high(g, j, start + h) : source.low(g, j, start + h);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++) {
                        const __m256i x = quad_of(a + (size_t)r * rows.inputs + (FOUR ? 16 * part : 0) + 4 * j);
#pragma GCC unroll 2
                        for (int h = 0; h < HALVES; h++) add_products(sums[r][FOUR ? 0 : part][h], w[h], x);
                    }
                }
            const float* row_scales = rows.scales + row * all + first + g;
            const float* row_sums = rows.scaled_sums + row * all + first + g;
            const int32_t* row_offsets = rows.offsets + row * all + first + g;
            const V scales = source.scale(g), minima = FOUR ? source.minimum(g) : scales;
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                const __m256 row_scale = _mm256_set1_ps(row_scales[(size_t)r * all]);
                const __m256 row_sum = _mm256_set1_ps(row_sums[(size_t)r * all]);
#pragma GCC unroll 2
                for (int h = 0; h < HALVES; h++) {
                    float* at = out + r * LANES + (start + h) * 8;
                    const __m256 scale = start + h ? scales.b : scales.a, minimum = start + h ? minima.b : minima.a;
                    __m256i dot = _mm256_madd_epi16(sums[r][0][h], ones);
                    if (!FOUR) {
                        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(sums[r][1][h], sixteens));
                        dot = _mm256_add_epi32(dot, _mm256_set1_epi32(row_offsets[(size_t)r * all]));
                    }
                    __m256 sum = _mm256_loadu_ps(at);
                    sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(scale, row_scale), sum);
                    if (FOUR) sum = _mm256_fmadd_ps(minimum, row_sum, sum);
                    _mm256_storeu_ps(at, sum);
                }
            }
        }
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

#if defined(__AVX512F__)
constexpr int TILE = 8;
#else
constexpr int TILE = 6;
#endif
constexpr int ROW_RUN = 64;  // rows that share the reading of a panel

// Calls `body` with the size of each tile, as a constant, and its first row.
template <typename F>
static inline void each_tile(int count, F body) {
    int row = 0;
    for (; row + TILE <= count; row += TILE) body(std::integral_constant<int, TILE>{}, row);
    for (; row + 4 <= count; row += 4) body(std::integral_constant<int, 4>{}, row);
    for (; row + 2 <= count; row += 2) body(std::integral_constant<int, 2>{}, row);
    if (row < count) body(std::integral_constant<int, 1>{}, row);
}

template <bool FOUR>
static void panel_int(const Linear& m, int panel, const Rows& rows, size_t row, int count, float* out) {
    Packed<FOUR> packed{m.data + panel * panel_bytes(m)};
    const int groups = rows.inputs / GROUP;
    each_tile(count, [&](auto size, int r) { tile_kept<size>(m, panel, rows, row + r, out + r * LANES); });
    if (count <= TILE) {
        each_tile(count, [&](auto size, int r) {
            tile_int<size, FOUR>(packed, 0, groups, rows, row + r, out + r * LANES);
        });
        return;
    }
    Unpacked<FOUR> stretch;
    for (int first = 0; first < groups; first += STRETCH, packed.data += STRETCH * Packed<FOUR>::BYTES) {
        const int length = groups - first < STRETCH ? groups - first : STRETCH;
        stretch.fill(packed, length);
        each_tile(count, [&](auto size, int r) {
            tile_int<size, FOUR>(stretch, first, length, rows, row + r, out + r * LANES);
        });
    }
}

// Product of `count` <= ROW_RUN rows with one panel, into out (count, 16).
static inline void panel_product(const Linear& m, int panel, const Rows& rows, size_t row, int count, float* out) {
    if (m.format == Q4) return panel_int<true>(m, panel, rows, row, count, out);
    if (m.format == Q8) return panel_int<false>(m, panel, rows, row, count, out);
    const uint8_t* data = m.data + panel * panel_bytes(m);
    each_tile(count, [&](auto size, int r) { tile_f32<size>(data, rows, row + r, out + r * LANES); });
}

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

}  // namespace mr
