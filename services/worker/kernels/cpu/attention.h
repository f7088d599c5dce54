// Attention of query rows over a paged cache, without gathering. One chain of operations per (row, head): keys in
// ascending order, in chunks of 64 aligned to absolute positions, so prefill, chunk and decode give the same bits.
#pragma once
#include "simd.h"

namespace mr {

constexpr int CHUNK = 64;
constexpr int MAX_HEAD = 256;

// Where one layer's keys (head_dim, block_size) and values (block_size, head_dim) of one head lie; strides in values.
struct Cache {
    void* data;
    size_t block_stride, layer_stride, value_offset, head_stride;
    int block_size, head_dim, half;
};

template <typename T>
static inline V load_kv(const T* p);
template <>
inline V load_kv<float>(const float* p) {
    return load(p);
}
template <>
inline V load_kv<uint16_t>(const uint16_t* p) {
    return load_half(p);
}

struct Softmax {
    float top;
    V sum;
};

// Scores of 16 keys for MR query rows (row stride `ldq`), each a chain over the head's values.
template <typename T, int MR>
static inline void scores16(const float* q, size_t ldq, const T* keys, int stride, int head_dim, float* out) {
    V sums[MR];
    for (int r = 0; r < MR; r++) sums[r] = splat(0.0f);
    for (int d = 0; d < head_dim; d++) {
        V key = load_kv<T>(keys + (size_t)d * stride);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) sums[r] = fma(splat(q[r * ldq + d]), key, sums[r]);
    }
    for (int r = 0; r < MR; r++) store(out + r * CHUNK, sums[r]);
}

// Turns `valid` of 64 scores into weights, and says by how much what was summed before must shrink.
static inline float weigh(float* s, int valid, Softmax& state) {
    for (int j = valid; j < CHUNK; j++) s[j] = -INFINITY;
    V best = vmax(vmax(load(s), load(s + 16)), vmax(load(s + 32), load(s + 48)));
    float top = max_lanes(best);
    if (!(top > state.top)) top = state.top;
    float shrink = state.top == -INFINITY ? 0.0f : (top == state.top ? 1.0f : exp1(state.top - top));
    state.sum = mul(state.sum, splat(shrink));
    for (int j = 0; j < valid; j += LANES) {
        alignas(64) float p[LANES];
        store(p, vexp(sub(load(s + j), splat(top))));
        for (int i = 0; i < LANES; i++) s[j + i] = j + i < valid ? p[i] : 0.0f;
        state.sum = add(state.sum, load(s + j));
    }
    state.top = top;
    return shrink;
}

template <typename T>
static inline void add_values(const float* p, const T* values, int head_dim, int count, float* out) {
    int d = 0;
    for (; d + 64 <= head_dim; d += 64) {
        V sums[4];
        for (int w = 0; w < 4; w++) sums[w] = load(out + d + w * LANES);
        for (int j = 0; j < count; j++) {
            V weight = splat(p[j]);
            for (int w = 0; w < 4; w++)
                sums[w] = fma(weight, load_kv<T>(values + (size_t)j * head_dim + d + w * LANES), sums[w]);
        }
        for (int w = 0; w < 4; w++) store(out + d + w * LANES, sums[w]);
    }
    for (; d < head_dim; d += LANES) {
        V sum = load(out + d);
        for (int j = 0; j < count; j++) sum = fma(splat(p[j]), load_kv<T>(values + (size_t)j * head_dim + d), sum);
        store(out + d, sum);
    }
}

#if defined(__AVX512F__)
constexpr int QUERY_TILE = 12;
#else
constexpr int QUERY_TILE = 6;
#endif

// `count` <= QUERY_TILE query rows of one key/value head: row r is at q + r × head_dim of a packed tile, sees keys
// up to and including position `limits[r]`, and writes to out[r].
template <typename T>
static void attend(
    const Cache& cache, size_t layer, int head, const int32_t* table, const float* q, const int32_t* limits, int count,
    float* const* out) {
    const int bs = cache.block_size, hd = cache.head_dim;
    alignas(64) float scores[QUERY_TILE * CHUNK];
    alignas(64) float sums[QUERY_TILE * MAX_HEAD];
    Softmax state[QUERY_TILE];
    int last = 0;
    for (int r = 0; r < count; r++) {
        state[r] = {-INFINITY, splat(0.0f)};
        last = limits[r] > last ? limits[r] : last;
    }
    memset(sums, 0, sizeof(float) * (size_t)count * hd);
    const size_t base = layer * cache.layer_stride + (size_t)head * cache.head_stride;
    for (int first = 0; first <= last; first += CHUNK) {
        for (int j = 0; j < CHUNK && first + j <= last; j += LANES) {
            int position = first + j;
            const T* block = (const T*)cache.data + (size_t)table[position / bs] * cache.block_stride + base;
            const T* keys = block + position % bs;
            int r = 0;
            for (; r + QUERY_TILE <= count; r += QUERY_TILE)
                scores16<T, QUERY_TILE>(q + (size_t)r * hd, hd, keys, bs, hd, scores + r * CHUNK + j);
            for (; r + 3 <= count; r += 3) scores16<T, 3>(q + (size_t)r * hd, hd, keys, bs, hd, scores + r * CHUNK + j);
            for (; r < count; r++) scores16<T, 1>(q + (size_t)r * hd, hd, keys, bs, hd, scores + r * CHUNK + j);
        }
        for (int r = 0; r < count; r++) {
            if (limits[r] < first) continue;
            int valid = limits[r] - first + 1 < CHUNK ? limits[r] - first + 1 : CHUNK;
            float* weights = scores + r * CHUNK;
            float* sum = sums + (size_t)r * hd;
            float shrink = weigh(weights, valid, state[r]);
            if (shrink != 1.0f)
                for (int d = 0; d < hd; d += LANES) store(sum + d, mul(load(sum + d), splat(shrink)));
            for (int j = 0; j < valid; j += bs < CHUNK ? bs : CHUNK) {
                int position = first + j, run = bs < CHUNK ? bs : CHUNK;
                int inside = valid - j < run ? valid - j : run;
                const T* block = (const T*)cache.data + (size_t)table[position / bs] * cache.block_stride + base;
                const T* values = block + cache.value_offset + (size_t)(position % bs) * hd;
                add_values<T>(weights + j, values, hd, inside, sum);
            }
        }
    }
    for (int r = 0; r < count; r++) {
        V total = splat(sum_lanes(state[r].sum));
        for (int d = 0; d < hd; d += LANES) store(out[r] + d, div(load(sums + (size_t)r * hd + d), total));
    }
}

// Writes one token's key and value of one head at `position`.
template <typename T>
static inline T to_kv(float x);
template <>
inline float to_kv<float>(float x) {
    return x;
}
template <>
inline uint16_t to_kv<uint16_t>(float x) {
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}
template <typename T>
static inline void write_kv(
    const Cache& cache, size_t layer, int head, int block, int offset, const float* key, const float* value) {
    const int bs = cache.block_size, hd = cache.head_dim;
    T* keys = (T*)cache.data + (size_t)block * cache.block_stride + layer * cache.layer_stride + head * cache.head_stride;
    T* values = keys + cache.value_offset + (size_t)offset * hd;
    for (int d = 0; d < hd; d++) keys[(size_t)d * bs + offset] = to_kv<T>(key[d]);
    for (int d = 0; d < hd; d++) values[d] = to_kv<T>(value[d]);
}

}  // namespace mr
