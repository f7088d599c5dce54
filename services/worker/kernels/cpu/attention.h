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
        V weights = vexp(sub(load(s + j), splat(top)));
        store(s + j, weights);
        for (int i = valid - j; i < LANES; i++) s[j + i] = 0.0f;
        state.sum = add(state.sum, valid - j < LANES ? load(s + j) : weights);
    }
    state.top = top;
    return shrink;
}

// Adds `count` weighted values to MR rows (weights CHUNK apart, sums head_dim apart), WIDE vectors of the head at a time.
template <typename T, int MR, int WIDE>
static inline void add_values(const float* p, const T* values, int head_dim, int count, float* out) {
    for (int d = 0; d < head_dim; d += WIDE * LANES) {
        V sums[MR][WIDE];
        for (int r = 0; r < MR; r++)
            for (int w = 0; w < WIDE; w++) sums[r][w] = load(out + (size_t)r * head_dim + d + w * LANES);
        for (int j = 0; j < count; j++) {
            V value[WIDE];
            for (int w = 0; w < WIDE; w++) value[w] = load_kv<T>(values + (size_t)j * head_dim + d + w * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                V weight = splat(p[r * CHUNK + j]);
                for (int w = 0; w < WIDE; w++) sums[r][w] = fma(weight, value[w], sums[r][w]);
            }
        }
        for (int r = 0; r < MR; r++)
            for (int w = 0; w < WIDE; w++) store(out + (size_t)r * head_dim + d + w * LANES, sums[r][w]);
    }
}

constexpr int QUERY_TILE = 24;  // rows that share a pass over the cache
constexpr int ROWS = 6;         // rows whose sums fit in registers

// How many of the chunk's keys a row sees; below 1 for none.
static inline int in_chunk(int limit, int first) { return limit - first + 1 < CHUNK ? limit - first + 1 : CHUNK; }

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
            for (; r + ROWS <= count; r += ROWS)
                scores16<T, ROWS>(q + (size_t)r * hd, hd, keys, bs, hd, scores + r * CHUNK + j);
            for (; r + 3 <= count; r += 3) scores16<T, 3>(q + (size_t)r * hd, hd, keys, bs, hd, scores + r * CHUNK + j);
            for (; r < count; r++) scores16<T, 1>(q + (size_t)r * hd, hd, keys, bs, hd, scores + r * CHUNK + j);
        }
        for (int r = 0; r < count; r++) {
            if (limits[r] < first) continue;
            float* sum = sums + (size_t)r * hd;
            float shrink = weigh(scores + r * CHUNK, in_chunk(limits[r], first), state[r]);
            if (shrink != 1.0f)
                for (int d = 0; d < hd; d += LANES) store(sum + d, mul(load(sum + d), splat(shrink)));
        }
        for (int r = 0, rows; r < count; r += rows) {
            rows = 1;
            if (limits[r] < first) continue;
            const int valid = in_chunk(limits[r], first);
            while (r + rows < count && rows < ROWS && in_chunk(limits[r + rows], first) == valid) rows++;
            rows = rows == ROWS ? ROWS : rows >= 3 ? 3 : 1;
            const int run = bs < CHUNK ? bs : CHUNK;
            for (int j = 0; j < valid; j += run) {
                const int position = first + j, inside = valid - j < run ? valid - j : run;
                const T* block = (const T*)cache.data + (size_t)table[position / bs] * cache.block_stride + base;
                const T* values = block + cache.value_offset + (size_t)(position % bs) * hd;
                float* sum = sums + (size_t)r * hd;
                if (rows == ROWS)
                    add_values<T, ROWS, 1>(scores + r * CHUNK + j, values, hd, inside, sum);
                else if (rows == 3)
                    add_values<T, 3, 2>(scores + r * CHUNK + j, values, hd, inside, sum);
                else
                    add_values<T, 1, 2>(scores + r * CHUNK + j, values, hd, inside, sum);
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
