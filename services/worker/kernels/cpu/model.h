// The whole transformer as one function run by all threads: phases with a barrier after each, tasks handed out by
// counter. Owns scratch memory; weights, tables and the cache belong to the caller.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>

#include "attention.h"
#include "linear.h"
#include "threads.h"

namespace mr {

// What Python fills in; the order of fields is `_ModelDescription` in kernels/cpu.py.
struct ModelDescription {
    int32_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, embedding_format;
    float norm_eps;
    int32_t has_bias;
    const void* embedding;  // rows as stored: float32, or Q8_0 blocks
    const float* norm;
    const float* cosines;  // (positions, head_dim / 2)
    const float* sines;
    const Linear* linears;      // per layer q k v o gate up down, then the output matrix
    const float* const* norms;  // per layer input, post
    const float* biases;        // per layer q, k, v joined; absent unless has_bias
};

struct StepDescription {
    int32_t tokens, requests, table_width, selected;
    const int32_t *token_ids, *positions, *query_starts, *tables, *selection;
    Cache cache;
    float* output;  // (selected, hidden)
};

// Memory that grows and is never shrunk.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    template <typename T>
    T* take(size_t count) {
        size_t bytes = (count * sizeof(T) + 63) / 64 * 64 + 64;
        if (bytes > size_) {
            std::free(data_);
            data_ = std::aligned_alloc(64, bytes);
            size_ = data_ ? bytes : 0;
            if (!data_) throw std::bad_alloc();
        }
        return (T*)data_;
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

struct RowBuffers {
    Scratch values, bytes, scales, sums, offsets, kept;
    Rows take(int inputs, size_t rows, bool floats) {
        Rows out{};
        out.inputs = inputs;
        if (floats) {
            out.values = values.take<float>(rows * inputs);
            return out;
        }
        size_t groups = rows * (inputs / GROUP);
        out.bytes = bytes.take<int8_t>(rows * inputs);
        out.scales = scales.take<float>(groups);
        out.scaled_sums = sums.take<float>(groups);
        out.offsets = offsets.take<int32_t>(groups);
        out.kept = kept.take<float>(rows * KEPT);
        return out;
    }
};

class Model {
  public:
    explicit Model(const ModelDescription& d)
        : d_(d),
          linears_(d.linears, d.linears + 7 * d.layers + 1),
          norms_(d.norms, d.norms + 2 * d.layers),
          floats_(d.linears[0].format == F32),
          tasks_(8 * d.layers + 8) {}

    void hidden(Pool& pool, const StepDescription& s) {
        hidden_alone_.timed(s.tokens, pool, [&](bool alone) { hidden(pool, alone, s); });
    }
    void logits(Pool& pool, const float* hidden, int rows, float* out) {
        logits_alone_.timed(rows, pool, [&](bool alone) { logits(pool, alone, hidden, rows, out); });
    }
    // Chooses the inputs that every quantised product keeps in float: those of the largest mean |x| over this step.
    void calibrate(const StepDescription& s);

  private:
    void hidden(Pool& pool, bool alone, const StepDescription& s);
    void logits(Pool& pool, bool alone, const float* hidden, int rows, float* out);
    // Where rows are quantised: the inputs of q k v, of o, of gate and up, of down in each layer, and of the output.
    enum Site { ATTENTION = 0, ATTENDED = 1, MLP = 2, GATED = 3, SITES = 4 };
    Rows at_site(Rows rows, int layer, int site) {
        if (rows.values) return rows;
        const size_t index = (size_t)layer * SITES + site;
        if (!channels_.empty()) rows.channels = channels_.data() + index * KEPT;
        if (!magnitudes_.empty()) rows.magnitudes = magnitudes_.data() + index * widest();
        return rows;
    }
    size_t widest() const { return (size_t)std::max({d_.hidden, d_.intermediate, d_.heads * d_.head_dim}); }
    void keep_columns(Linear& m, const int32_t* channels);
    void embed(const StepDescription& s, float* x, int token) const;
    void norm_row(const float* x, const float* weight, const Rows& rows, size_t row, float* plain) const;
    void rotate_and_store(const StepDescription& s, float* qkv, int layer, int token, int request) const;
    void attend_tile(const StepDescription& s, const float* qkv, int layer, int task, const Rows& rows) const;
    template <typename F>
    void product(int phase, const Linear* m, int matrices, const Rows& rows, int count, int threads, F finish);
    void gate_up(int phase, const Linear* m, const Rows& in, const Rows& out, int count, int threads);

    ModelDescription d_;
    std::vector<Linear> linears_;
    std::vector<const float*> norms_;
    bool floats_;
    Tasks tasks_;
    Alone hidden_alone_, logits_alone_;
    Scratch x_, qkv_, request_of_, tiles_;
    RowBuffers normed_, attended_, gated_, head_;
    std::vector<int32_t> channels_;               // (sites, KEPT); empty until calibrated
    std::vector<float> magnitudes_;               // (sites, widest) while calibrating
    std::vector<std::vector<float>> columns_;     // what each matrix's `kept` points to
    struct Tile {
        int32_t request, first, count;
    };
    Tile* tile_list_ = nullptr;
    int tile_count_ = 0;
};

inline void Model::embed(const StepDescription& s, float* x, int token) const {
    const int width = d_.hidden;
    float* out = x + (size_t)token * width;
    size_t id = (size_t)s.token_ids[token];
    if (d_.embedding_format == F32) {
        memcpy(out, (const float*)d_.embedding + id * width, sizeof(float) * width);
        return;
    }
    const uint8_t* block = (const uint8_t*)d_.embedding + id * (width / GROUP) * 34;
    for (int g = 0; g < width / GROUP; g++, block += 34) {
        uint16_t half;
        memcpy(&half, block, 2);
        float scale = _cvtsh_ss(half);
        for (int i = 0; i < GROUP; i++) out[g * GROUP + i] = scale * (float)(int8_t)block[2 + i];
    }
}

// RMSNorm of one row; the result goes to `plain`, or into `rows` for the next product.
inline void Model::norm_row(const float* x, const float* weight, const Rows& rows, size_t row, float* plain) const {
    const int width = d_.hidden;
    V squares = splat(0.0f);
    int i = 0;
    for (; i + LANES <= width; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float total = sum_lanes(squares);
    for (; i < width; i++) total += x[i] * x[i];
    float factor = 1.0f / std::sqrt(total / (float)width + d_.norm_eps);
    float* out = plain ? plain : rows.values ? rows.values + row * width : nullptr;
    if (out) {
        for (i = 0; i < width; i++) out[i] = weight[i] * (x[i] * factor);
        return;
    }
    alignas(64) float group[GROUP];
    for (int g = 0; g < width / GROUP; g++) {
        for (int j = 0; j < GROUP; j++) group[j] = weight[g * GROUP + j] * (x[g * GROUP + j] * factor);
        quantise_group(group, rows, row, g);
    }
}

inline void Model::rotate_and_store(const StepDescription& s, float* qkv, int layer, int token, int request) const {
    const int hd = d_.head_dim, half = hd / 2;
    const int width = (d_.heads + 2 * d_.kv_heads) * hd;
    float* row = qkv + (size_t)token * width;
    if (d_.has_bias)
        for (int i = 0; i < width; i++) row[i] += d_.biases[(size_t)layer * width + i];
    const int position = s.positions[token];
    const float* cosine = d_.cosines + (size_t)position * half;
    const float* sine = d_.sines + (size_t)position * half;
    const float scale = 1.0f / std::sqrt((float)hd);
    for (int head = 0; head < d_.heads + d_.kv_heads; head++) {
        float* v = row + (size_t)head * hd;
        float by = head < d_.heads ? scale : 1.0f;
        for (int i = 0; i < half; i++) {
            float a = v[i], b = v[i + half];
            v[i] = (a * cosine[i] - b * sine[i]) * by;
            v[i + half] = (b * cosine[i] + a * sine[i]) * by;
        }
    }
    const float* keys = row + (size_t)d_.heads * hd;
    const float* values = keys + (size_t)d_.kv_heads * hd;
    const int bs = s.cache.block_size;
    int block = s.tables[(size_t)request * s.table_width + position / bs], offset = position % bs;
    for (int head = 0; head < d_.kv_heads; head++)
        if (s.cache.half)
            write_kv<uint16_t>(s.cache, layer, head, block, offset, keys + head * hd, values + head * hd);
        else
            write_kv<float>(s.cache, layer, head, block, offset, keys + head * hd, values + head * hd);
}

inline void Model::attend_tile(
    const StepDescription& s, const float* qkv, int layer, int task, const Rows& rows) const {
    const Tile& tile = tile_list_[task / d_.kv_heads];
    const int kv_head = task % d_.kv_heads, hd = d_.head_dim, group = d_.heads / d_.kv_heads;
    const size_t width = (size_t)(d_.heads + 2 * d_.kv_heads) * hd;
    const int32_t* table = s.tables + (size_t)tile.request * s.table_width;
    alignas(64) float q[QUERY_TILE * MAX_HEAD], result[QUERY_TILE * MAX_HEAD];
    int32_t limits[QUERY_TILE];
    float* out[QUERY_TILE];
    const int all = tile.count * group;
    for (int first = 0; first < all; first += QUERY_TILE) {
        int count = all - first < QUERY_TILE ? all - first : QUERY_TILE;
        for (int r = 0; r < count; r++) {
            int token = tile.first + (first + r) / group, head = kv_head * group + (first + r) % group;
            memcpy(q + (size_t)r * hd, qkv + token * width + (size_t)head * hd, sizeof(float) * hd);
            limits[r] = s.positions[token];
            out[r] = rows.values ? rows.values + (size_t)token * rows.inputs + (size_t)head * hd : result + (size_t)r * hd;
        }
        if (s.cache.half)
            attend<uint16_t>(s.cache, layer, kv_head, table, q, limits, count, out);
        else
            attend<float>(s.cache, layer, kv_head, table, q, limits, count, out);
        if (rows.values) continue;
        for (int r = 0; r < count; r++) {
            int token = tile.first + (first + r) / group, head = kv_head * group + (first + r) % group;
            for (int g = 0; g < hd / GROUP; g++) quantise_group(out[r] + g * GROUP, rows, token, head * hd / GROUP + g);
        }
    }
}

// Products of `count` rows with `matrices` matrices side by side; `finish(row, column, values, width)` takes 16 outputs.
template <typename F>
void Model::product(int phase, const Linear* m, int matrices, const Rows& rows, int count, int threads, F finish) {
    int panels = 0;
    for (int i = 0; i < matrices; i++) panels += m[i].panels;
    const int row_step = count <= ROW_RUN ? count : ROW_RUN;
    const int row_tasks = (count + row_step - 1) / row_step;
    int per_task = panels * row_tasks / (threads * 6);
    per_task = per_task < 1 ? 1 : per_task > 8 ? 8 : per_task;
    const int panel_tasks = (panels + per_task - 1) / per_task;
    tasks_.each(phase, panel_tasks * row_tasks, [&](int task) {
        const int first_row = task % row_tasks * row_step;
        const int last_row = first_row + row_step < count ? first_row + row_step : count;
        const int last = (task / row_tasks + 1) * per_task;
        for (int panel = task / row_tasks * per_task; panel < last && panel < panels; panel++) {
            int which = 0, local = panel, column = 0;
            while (local >= m[which].panels) {
                local -= m[which].panels;
                column += m[which++].outputs;
            }
            int width = m[which].outputs - local * LANES < LANES ? m[which].outputs - local * LANES : LANES;
            alignas(64) float out[ROW_RUN * LANES];
            panel_product(m[which], local, rows, first_row, last_row - first_row, out);
            for (int row = first_row; row < last_row; row++)
                finish(row, column + local * LANES, out + (row - first_row) * LANES, width);
        }
    });
}

// silu(gate) × up, two panels (one group) at a time so that the result is ready for the next product.
inline void Model::gate_up(int phase, const Linear* m, const Rows& in, const Rows& out, int count, int threads) {
    const int groups = d_.intermediate / GROUP, row_step = count <= ROW_RUN ? count : ROW_RUN;
    const int row_tasks = (count + row_step - 1) / row_step;
    (void)threads;
    tasks_.each(phase, groups * row_tasks, [&](int task) {
        const int g = task / row_tasks, first_row = task % row_tasks * row_step;
        const int last_row = first_row + row_step < count ? first_row + row_step : count;
        alignas(64) float gate[2][ROW_RUN * LANES], up[2][ROW_RUN * LANES], group[GROUP];
        for (int half = 0; half < 2; half++)
            panel_product(m[0], 2 * g + half, in, first_row, last_row - first_row, gate[half]);
        for (int half = 0; half < 2; half++)
            panel_product(m[1], 2 * g + half, in, first_row, last_row - first_row, up[half]);
        for (int row = first_row; row < last_row; row++) {
            const int at = (row - first_row) * LANES;
            for (int half = 0; half < 2; half++)
                store(group + half * LANES, mul(silu(load(gate[half] + at)), load(up[half] + at)));
            if (out.values)
                memcpy(out.values + (size_t)row * out.inputs + g * GROUP, group, sizeof group);
            else
                quantise_group(group, out, row, g);
        }
    });
}

inline void Model::hidden(Pool& pool, bool alone, const StepDescription& s) {
    const int tokens = s.tokens, threads = alone ? 1 : pool.size(), hd = d_.head_dim;
    const int width = (d_.heads + 2 * d_.kv_heads) * hd;
    float* x = x_.take<float>((size_t)tokens * d_.hidden);
    float* qkv = qkv_.take<float>((size_t)tokens * width);
    int32_t* request_of = request_of_.take<int32_t>(tokens);
    tile_list_ = tiles_.take<Tile>(tokens);
    tile_count_ = 0;
    const int group = d_.heads / d_.kv_heads, step = QUERY_TILE / group > 0 ? QUERY_TILE / group : 1;
    for (int r = 0; r < s.requests; r++)
        for (int t = s.query_starts[r]; t < s.query_starts[r + 1]; t++) {
            request_of[t] = r;
            if ((t - s.query_starts[r]) % step == 0) {
                int left = s.query_starts[r + 1] - t;
                tile_list_[tile_count_++] = {r, t, left < step ? left : step};
            }
        }
    Rows normed = normed_.take(d_.hidden, tokens, floats_);
    Rows attended = attended_.take(d_.heads * hd, tokens, floats_);
    Rows gated = gated_.take(d_.intermediate, tokens, floats_);
    const int batch = tokens < 4 * threads ? 1 : tokens / (4 * threads);
    const int batches = (tokens + batch - 1) / batch;
    auto each_token = [&](int phase, auto body) {
        tasks_.each(phase, batches, [&](int task) {
            for (int t = task * batch; t < (task + 1) * batch && t < tokens; t++) body(t);
        });
    };
    auto add = [&](int row, int column, const float* values, int count) {
        float* out = x + (size_t)row * d_.hidden + column;
        for (int i = 0; i < count; i++) out[i] += values[i];
    };
    tasks_.reset();
    pool.run(alone, [&](int) {
        each_token(0, [&](int t) {
            embed(s, x, t);
            norm_row(x + (size_t)t * d_.hidden, norms_[0], at_site(normed, 0, ATTENTION), t, nullptr);
        });
        pool.barrier();
        for (int layer = 0, phase = 1; layer < d_.layers; layer++, phase += 6) {
            const Linear* m = linears_.data() + 7 * layer;
            const Rows to_attention = at_site(normed, layer, ATTENTION), to_output = at_site(attended, layer, ATTENDED);
            const Rows to_mlp = at_site(normed, layer, MLP), to_down = at_site(gated, layer, GATED);
            product(phase, m, 3, to_attention, tokens, threads, [&](int row, int column, const float* values, int count) {
                memcpy(qkv + (size_t)row * width + column, values, sizeof(float) * count);
            });
            pool.barrier();
            each_token(phase + 1, [&](int t) { rotate_and_store(s, qkv, layer, t, request_of[t]); });
            pool.barrier();
            tasks_.each(phase + 2, tile_count_ * d_.kv_heads, [&](int task) { attend_tile(s, qkv, layer, task, to_output); });
            pool.barrier();
            product(phase + 3, m + 3, 1, to_output, tokens, threads, add);
            pool.barrier();
            each_token(phase + 4, [&](int t) {
                norm_row(x + (size_t)t * d_.hidden, norms_[2 * layer + 1], to_mlp, t, nullptr);
            });
            pool.barrier();
            gate_up(phase + 5, m + 4, to_mlp, to_down, tokens, threads);
            pool.barrier();
            product(6 * d_.layers + 2 + 2 * layer, m + 6, 1, to_down, tokens, threads, add);
            pool.barrier();
            if (layer + 1 < d_.layers) {
                const Rows next = at_site(normed, layer + 1, ATTENTION);
                each_token(6 * d_.layers + 3 + 2 * layer, [&](int t) {
                    norm_row(x + (size_t)t * d_.hidden, norms_[2 * layer + 2], next, t, nullptr);
                });
                pool.barrier();
            }
        }
        tasks_.each(8 * d_.layers + 4, s.selected, [&](int row) {
            norm_row(x + (size_t)s.selection[row] * d_.hidden, d_.norm, normed, 0, s.output + (size_t)row * d_.hidden);
        });
    });
}

inline void Model::logits(Pool& pool, bool alone, const float* hidden, int rows, float* out) {
    const Linear& head = linears_.back();
    Rows in = at_site(head_.take(d_.hidden, rows, head.format == F32), d_.layers, ATTENTION);
    if (head.format == F32)
        memcpy(in.values, hidden, sizeof(float) * (size_t)rows * d_.hidden);
    else
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < d_.hidden / GROUP; g++)
                quantise_group(hidden + (size_t)r * d_.hidden + g * GROUP, in, r, g);
    tasks_.reset();
    pool.run(alone, [&](int) {
        product(0, &head, 1, in, rows, alone ? 1 : pool.size(), [&](int row, int column, const float* values, int count) {
            memcpy(out + (size_t)row * d_.vocabulary + column, values, sizeof(float) * count);
        });
    });
}

inline void Model::keep_columns(Linear& m, const int32_t* channels) {
    if (m.format == F32) return;
    std::vector<float> columns((size_t)m.panels * KEPT * LANES);
    float* out = columns.data();
    for (int panel = 0; panel < m.panels; panel++)
        for (int k = 0; k < KEPT; k++)
            for (int lane = 0; lane < LANES; lane++) *out++ = weight_at(m, panel, lane, channels[k]);
    columns_.push_back(std::move(columns));
    m.kept = columns_.back().data();
}

inline void Model::calibrate(const StepDescription& s) {
    const size_t sites = (size_t)d_.layers * SITES + 1, width = widest();
    Pool alone(1);  // sums in one order
    channels_.clear();
    magnitudes_.assign(sites * width, 0.0f);
    std::vector<float> unread((size_t)s.selected * d_.vocabulary);
    hidden(alone, s);
    logits(alone, s.output, s.selected, unread.data());
    std::vector<float> sums;
    sums.swap(magnitudes_);
    channels_.resize(sites * KEPT);
    std::vector<int32_t> order(width);
    for (size_t site = 0; site < sites; site++) {
        const float* of = sums.data() + site * width;
        for (size_t i = 0; i < width; i++) order[i] = (int32_t)i;
        std::partial_sort(order.begin(), order.begin() + KEPT, order.end(), [of](int a, int b) {
            return of[a] != of[b] ? of[a] > of[b] : a < b;
        });
        std::sort(order.begin(), order.begin() + KEPT);
        std::copy_n(order.begin(), KEPT, channels_.begin() + site * KEPT);
    }
    columns_.clear();
    for (int layer = 0; layer < d_.layers; layer++)
        for (int i = 0; i < 7; i++) {
            const int site = i < 3 ? ATTENTION : i == 3 ? ATTENDED : i < 6 ? MLP : GATED;
            keep_columns(linears_[7 * layer + i], channels_.data() + ((size_t)layer * SITES + site) * KEPT);
        }
    keep_columns(linears_.back(), channels_.data() + (size_t)d_.layers * SITES * KEPT);
}

}  // namespace mr
